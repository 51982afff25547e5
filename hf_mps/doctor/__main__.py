"""`python -m hf_mps.doctor`: the same command as `hf-mps doctor`."""

import sys

from hf_mps.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["doctor", *sys.argv[1:]], program="python -m hf_mps.doctor"))
