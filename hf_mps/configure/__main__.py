"""`python -m hf_mps.configure`: the same command as `hf-mps config`."""

import sys

from hf_mps.cli import main

if __name__ == "__main__":
    sys.exit(main(["config", *sys.argv[1:]], program="python -m hf_mps.configure"))
