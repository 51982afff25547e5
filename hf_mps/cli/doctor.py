"""`hf-mps doctor` and `config`: this machine, and Accelerate's configuration file for it."""

from __future__ import annotations

from typer import Option

from hf_mps.cli.options import Json, deferred
from hf_mps.core.errors import UserError, user_path


@deferred
def doctor(
    trials: bool = Option(
        False, "--trials", help="Also try the device for every fault that a guard knows; may take minutes."
    ),
    release: str | None = Option(
        None, "--torch", metavar="RELEASE", help="Tell instead what another release of PyTorch would change."
    ),
    json: Json = False,
) -> None:
    """Tell whether this machine is ready to train on Metal, and if not, what to type.

    Exit code 0 where all is well, 1 where something needs a repair. Paste its text into an issue report.

    Example: `hf-mps doctor`
    """
    from hf_mps.tools.doctor import run, run_upgrade

    if release is None:
        run(trials=trials, json=json)
        return
    if trials:
        raise UserError("--trials cannot be combined with --torch: it tries the installed release; give one of them")
    run_upgrade(release, json=json)


@deferred
def config(
    config_file: str | None = Option(
        None, "--config_file", metavar="PATH", help="Default: where accelerate launch looks for it."
    ),
    yes: bool = Option(False, "--yes", help="Write without asking."),
    check: bool = Option(False, "--check", help="Change nothing; exit code 1 for a repair."),
    json: bool = Option(False, "--json", help="Ask nothing and print one JSON object."),
    num_machines: int | None = Option(None, "--num_machines", help="The number of Macs that train together."),
    machine_rank: int | None = Option(None, "--machine_rank", help="The number of this Mac; 0 is the main one."),
    main_process_ip: str | None = Option(
        None, "--main_process_ip", metavar="ADDRESS", help="Where the others reach the main one."
    ),
    main_process_port: int | None = Option(
        None, "--main_process_port", metavar="PORT", help="Its port. Default: 29500."
    ),
) -> None:
    """Write or repair Accelerate's configuration file for this Mac, or for several.

    It shows what changes and why, and keeps a backup. It leaves alone a file that it does not understand.

    Example: `hf-mps config --check`
    """
    from hf_mps.tools.doctor import accelerate_config

    path = user_path(config_file) if config_file else accelerate_config.default_place()
    if check:
        accelerate_config.check(path, json=json)
    else:
        said = accelerate_config.Machines(num_machines, machine_rank, main_process_ip, main_process_port)
        accelerate_config.run(path, yes=yes or json, json=json, said=said)
