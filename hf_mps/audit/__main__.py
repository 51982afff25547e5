"""`python -m hf_mps.audit TARGET`: the same command as `hf-mps audit`."""

import sys

from hf_mps.cli import main

if __name__ == "__main__":
    sys.exit(main(["audit", *sys.argv[1:]], program="python -m hf_mps.audit"))
