"""Training over slow links: a recipe's `link` section as choices, and what carries them out, all of it PyTorch's.

Gradients are compressed by DistributedDataParallel's communication hooks, through accelerate's handler of them; local
steps are accelerate's LocalSGD. Without other processes the section changes nothing, and `--plan` says what it would.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.distributed.link import cost
from hf_mps.distributed.link.cost import Gradients, Link
from hf_mps.distributed.world import World

if TYPE_CHECKING:
    from hf_mps.finetune.recipe.schema import LinkSection

COMPRESSION, LOCAL_STEPS, LINK = "compression", "local_steps", "link"
WHAT = {
    cost.FP16: "gradients are sent as float16, half of the bytes, and rounded to 11 bits",
    cost.BF16: "gradients are sent as bfloat16, half of the bytes, and rounded to 8 bits",
    cost.POWERSGD: "each matrix of gradients is sent as two vectors (PowerSGD of rank 1), its error added to the next",
}
WARM_UP_SHARE = 10
"""One step in so many is sent whole before PowerSGD begins: early gradients are of higher rank (powerSGD_hook.py)."""
FIRST_STEP = 2
"""The least that PowerSGD takes: DistributedDataParallel forms its buckets anew after the first step."""
WHOLE_MIB = 2**20
"""A bucket that holds every gradient."""
SHOWN_RANKS = (2, 4)
"""The numbers of hosts that a plan weighs where there is one process."""


def decide(said: LinkSection, training: Mapping[str, Any], model: Any, world: World) -> dict[str, Choice[Any]]:
    """Return the choices of a recipe's `link` section; none for a process alone whose recipe says nothing of links.

    Raises UserError for keys that do not go together.
    """
    _refuse(said, training)
    if world.alone and said == type(said)():
        return {}
    alone = "no other process takes part, so nothing is sent; "
    choices: dict[str, Choice[Any]] = {}
    if said.compression != cost.NONE:
        choices[COMPRESSION] = Choice(said.compression, (alone if world.alone else "") + WHAT[said.compression])
    if said.local_steps > 1:
        what = f"each rank trains by itself, and weights are averaged every {said.local_steps} steps, before an "
        what += "evaluation and before a checkpoint: not the numbers of one process"
        choices[LOCAL_STEPS] = Choice(said.local_steps, (alone if world.alone else "") + what)
    if said.batches != "equal":
        what = "a step's rows are dealt by the speed of each rank, and the mean of the loss is over all of them"
        choices["batches"] = Choice(said.batches, (alone if world.alone else "") + what)
    if said.bandwidth is not None and said.latency is not None:
        link = Link(1e9 * said.bandwidth, 1e-3 * said.latency)
        choices |= _weighed(link, "the recipe says so", model, world, said.local_steps)
    return choices


def _refuse(said: LinkSection, training: Mapping[str, Any]) -> None:
    if said.compression != cost.NONE and said.local_steps > 1:
        raise UserError(
            f"link.compression={said.compression} and link.local_steps={said.local_steps}: local steps send weights "
            "whole and no gradients; give one of them"
        )
    if said.batches != "equal" and said.local_steps > 1:
        raise UserError(
            f"link.batches deals the rows of a common step, and link.local_steps={said.local_steps} has none; give one"
            " of them"
        )
    if (said.bandwidth is None) != (said.latency is None):
        raise UserError(
            "link.bandwidth and link.latency belong together; next: hf-mps doctor --peers HOST measures both"
        )
    if said.reshapes and training.get("fsdp"):
        key = "compression" if said.compression != cost.NONE else "local_steps"
        raise UserError(
            f"link.{key} is for copies of a whole model, and training.fsdp shards it; leave one of them out"
        )


def _weighed(link: Link, why: str, model: Any, world: World, local_steps: int) -> dict[str, Choice[Any]]:
    """Return the link with what a step of `model` sends over it, each way, and what pays; alone for some hosts."""
    gradients = Gradients(tuple(tuple(each.shape) for each in model.parameters() if each.requires_grad))
    steps = local_steps if local_steps > 1 else cost.LOCAL_STEPS
    choices: dict[str, Choice[Any]] = {LINK: Choice(link, why)}
    for ranks in SHOWN_RANKS if world.alone else (world.size,):
        found = cost.ways(gradients, link, ranks, steps)
        others = ", ".join(str(way) for name, way in found.items() if name != cost.NONE)
        words = f"gradients as they are; {others}; {cost.advice(found)}"
        choices[f"sent by {ranks} ranks"] = Choice(found[cost.NONE].amount, words)
    return choices


def compress(trainer: Any, choices: Mapping[str, Choice[Any]]) -> None:
    """Have accelerate register the chosen communication hook when it wraps the model; nothing where none is chosen.

    Raises UserError where the processes do not train with DistributedDataParallel.
    """
    if COMPRESSION not in choices or World.here().alone:
        return
    from accelerate.utils import DDPCommunicationHookType

    handler, chosen = trainer.accelerator.ddp_handler, choices[COMPRESSION].value
    kind = trainer.accelerator.distributed_type.value
    if handler is None or not (kind == "NO" or kind.startswith("MULTI_")):
        raise UserError(
            f"link.compression={chosen} is for DistributedDataParallel, and accelerate trains under {kind}; next: "
            "link.compression=none"
        )
    if chosen == cost.BF16 and trainer.args.device.type != "cuda":
        trainer.accelerator.ddp_handler = _registered_by(_in_bfloat16, handler)
        return
    if chosen != cost.POWERSGD:
        handler.comm_hook = DDPCommunicationHookType(chosen)
        return
    from hf_mps.distributed.link import own_state
    from hf_mps.distributed.link.power_sgd import PowerSGD

    first = max(FIRST_STEP, choices["steps"].value // WARM_UP_SHARE)
    hook = PowerSGD(matrix_approximation_rank=cost.RANK, start_powerSGD_iter=first)
    _in_one_bucket(trainer, handler)
    trainer.accelerator.ddp_handler = _registered_by(hook.register, handler)
    own_state.keep(trainer, "powersgd", hook.kept, hook.go_on)


def _in_one_bucket(trainer: Any, handler: Any) -> None:
    """Leave nothing else to be reduced while PowerSGD's second all-reduce is sent, unless NCCL keeps the order.

    PyTorch's hook starts it in a callback and waits there (`compute_qs`). On Gloo the callback is in one of its two
    threads: a second bucket blocks the other one for good, and what the main thread reduces meanwhile, the map of
    unused parameters, may come first on one rank and last on another. Raises UserError for weights of several types,
    which never share a bucket.
    """
    if trainer.args.device.type == "cuda":
        return
    kinds = sorted({str(each.dtype) for each in trainer.model.parameters() if each.requires_grad})
    if len(kinds) > 1:
        raise UserError(
            f"link.compression=powersgd: the model trains weights of {' and '.join(kinds)}, and Gloo reduces one type;"
            " next: link.compression=bf16"
        )
    handler.bucket_cap_mb, handler.find_unused_parameters = WHOLE_MIB, False


def _registered_by(register: Callable[[Any], None], handler: Any) -> Any:
    """Return accelerate's handler with a hook that `register` gives a DistributedDataParallel model."""
    from accelerate.utils import DistributedDataParallelKwargs

    class Registering(DistributedDataParallelKwargs):  # type: ignore[misc]
        def register_comm_hook(self, model: Any) -> None:
            register(model)

    return Registering(**vars(handler))


def _in_bfloat16(model: Any) -> None:
    """Register PyTorch's own bfloat16 hook.

    By that hook's name DistributedDataParallel asks for NCCL (`_check_comm_hook`). What the hook needs is a backend
    that adds bfloat16, as Gloo does.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    model.register_comm_hook(None, lambda state, bucket: default_hooks.bf16_compress_hook(state, bucket))


def step_locally(trainer: Any, choices: Mapping[str, Choice[Any]]) -> None:
    """Add the callback of local steps, behind all others: what they ask for in a step is averaged first."""
    if LOCAL_STEPS not in choices or World.here().alone:
        return
    from hf_mps.distributed.link import own_state
    from hf_mps.distributed.link.local_steps import LocalSteps

    # Counting the items of a step across ranks makes the mean of one step exact, at the price of a round trip; there
    # is no such mean where each rank steps by itself.
    trainer.args.average_tokens_across_devices = False
    trainer.add_callback(LocalSteps(trainer, choices[LOCAL_STEPS].value))
    if not World.here().main:  # whose optimizer is in each checkpoint
        own_state.keep(
            trainer,
            "optimizer",
            lambda: trainer.optimizer.state_dict(),
            lambda kept: trainer.optimizer.load_state_dict(kept),
        )


def measure(trainer: Any, choices: dict[str, Choice[Any]]) -> None:
    """Measure the link where the run has several hosts and the recipe does not say it; called by all ranks."""
    world = World.here()
    if world.hosts < 2 or LINK in choices or not trainer.accelerator.use_distributed:
        return
    from hf_mps.distributed.link import probe

    link = probe.measure(trainer.args.device)
    local = choices[LOCAL_STEPS].value if LOCAL_STEPS in choices else 1
    choices |= _weighed(link, "measured between the ranks", trainer.model, world, local)
