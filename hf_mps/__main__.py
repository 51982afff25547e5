"""`python -m hf_mps VERB …`: the same command as `hf-mps VERB …`."""

import sys

from hf_mps.cli.main import main

if __name__ == "__main__":
    sys.exit(main(program="python -m hf_mps"))
