"""`python -m hf_mps.finetune RECIPE [key=value …]`: the same command as `hf-mps finetune`."""

import sys

from hf_mps.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["finetune", *sys.argv[1:]], program="python -m hf_mps.finetune"))
