"""`python -m hf_mps.doctor.accelerate_config`: the same command as `hf-mps config`."""

import sys

from hf_mps.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["config", *sys.argv[1:]], program="python -m hf_mps.doctor.accelerate_config"))
