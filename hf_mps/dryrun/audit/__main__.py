"""`python -m hf_mps.dryrun.audit TARGET`: the same command as `hf-mps audit`."""

import sys

from hf_mps.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["audit", *sys.argv[1:]], program="python -m hf_mps.dryrun.audit"))
