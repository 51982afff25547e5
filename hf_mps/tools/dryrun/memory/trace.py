"""The memory of a training step, followed tensor by tensor: its peak, of what it is made, and the largest batch.

Fake tensors hold nothing: a laptop's memory is enough to find the peak of a 7-billion-parameter model.

The peak of a deep model comes from traces of a few of its layers (`hf_mps.tools.dryrun.layers`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from hf_mps.core.choice import Choice
from hf_mps.core.errors import RunError
from hf_mps.core.text import summary
from hf_mps.finetune.loss import chunked
from hf_mps.finetune.smoke.fake import DEVICE, needs_numbers
from hf_mps.finetune.smoke.repeats import Known, answered, form_of, made
from hf_mps.layer.fused_step.attention import blockwise
from hf_mps.metal.operators.calls import tensors_of
from hf_mps.metal.operators.launch_class import Call
from hf_mps.tools.dryrun import batch, layers, meta_model, prepare
from hf_mps.tools.dryrun.audit.record import OperatorRecorder
from hf_mps.tools.dryrun.layers import ADDED, Cut, Kept
from hf_mps.tools.dryrun.memory.loops import Loops
from hf_mps.tools.dryrun.memory.machine import largest
from hf_mps.tools.dryrun.memory.moments import Peak, folded, highest, scaled
from hf_mps.tools.dryrun.modules import BACKWARD, CLIPPING, FORWARD, GENERATION, LOSS, OPTIMIZER, ModuleTracker, family
from hf_mps.tools.dryrun.step import TrainingStep, generates, models_of

WEIGHTS, GRADIENTS, STATE, CACHE = "weights", "gradients", "optimizer", "generation"
ACTIVATIONS, LOGITS, WORKING, GATHERED = "activations", "logits", "working", "gathered"
PARTS = {
    WEIGHTS: "parameters and buffers",
    GRADIENTS: "of the parameters that train",
    STATE: "the optimizer's moments, and its working copies",
    CACHE: "keys and values of the completions that a step generates, and what a pass over them makes",
    ACTIVATIONS: "what the forward pass makes, most of it kept for the backward pass",
    LOGITS: "tensors as wide as the vocabulary: the output layer's and the loss's",
    WORKING: "what the backward pass and clipping make on the way",
    GATHERED: "under FSDP: the blocks' whole weights and gradients, and what ranks send each other",
}
SENDING = ("c10d::", "fsdp::")
"""What names of the operators begin with between which weights are gathered and gradients scattered."""
_OF_PHASE = {
    GENERATION: CACHE,
    **dict.fromkeys((FORWARD, LOSS), ACTIVATIONS),
    **dict.fromkeys((BACKWARD, CLIPPING), WORKING),
    OPTIMIZER: STATE,
}
# At most so many steps: the first makes the optimizer's moments, so the second one is the highest.
STEPS = 2


class Memory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Enter it around a step: counts the bytes of every storage on the device from its making until it is freed."""

    recorder: OperatorRecorder | None = None
    """It is told of every operator, and not entered itself."""
    loops: Loops | None = None
    """It is told of every operator too."""

    def __init__(self, tracker: ModuleTracker, device: str = "mps", vocabulary: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = Peak()
        self.moments: dict[tuple[tuple[str, str], str], Peak] | None = None
        """The highest moment of each operator at each place; None where nobody asks."""
        self._operator = ""
        self._tracker, self._device, self._vocabulary = tracker, device, vocabulary
        self._live: dict[int, tuple[Any, int, str]] = {}
        self._added: dict[tuple[int, int], Known] = {}
        self._now = 0
        self._parts = dict.fromkeys(PARTS, 0)
        self.known: dict[Any, tuple[Any, int, list[Call]]] = {}
        """What parts of a step return, hold on the way and call, by what they are and get (`once`)."""
        self.trained: set[str] = set()
        """The names of the parameters that got a gradient."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled in a trace, and the skipping costs as much as an answer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # As in OperatorRecorder: asked twice an operator, through every mode.
        if func is DEVICE and type(args[0]) is FakeTensor:
            return args[0].fake_device  # as `device` says outside of FakeTensorMode's own calls, which are below this
        kwargs, known, name = kwargs or {}, None, func.name()
        # Without this a tensor that is used twice would cost a third gradient, which no real run has.
        if func is torch.ops.aten.add.Tensor and not kwargs and (place := self._joined(*args)) is not None:
            result, added = answered(torch.ops.aten.add_.Tensor, (args[place], args[1 - place]), {})
            if added is not None:
                known = self._added.setdefault((id(added), place), Known(None))
        elif name in meta_model.EXPANDED:
            self._operator = name
            part = self.once(partial(meta_model.expanded, func, **kwargs), (func, *kwargs.items()))
            # What its kernel makes on the way counts too, and is no operator of the step.
            with patch.object(self, "recorder", None), self:
                result = part(*args)
        else:
            self._operator = name
            result, known = answered(func, args, kwargs)
            if type(result) is FakeTensor and name.startswith("aten::"):
                self._made(result)
            elif name.startswith(SENDING):
                for leaf in tensors_of(args, kwargs, result):
                    self.sent(leaf)
            else:
                for leaf in tensors_of(result):
                    self._made(leaf)
        if self.loops is not None:
            self.loops.saw(func, result)
        if self.recorder is not None:
            self.recorder.saw(func, args, kwargs, result, known)
        return result

    def once(self, stock: Callable[..., Any], name: Any = None) -> Callable[..., Any]:
        """Return a part of attention in blocks, or of an operator of bitsandbytes, that is followed once for each shape
        of what goes in.

        Its many calls are the same each time: the next time they are taken as known, and so is what they hold. `name`
        stands for `stock` where that is another object each time.
        """

        def replacement(*given: Any) -> Any:
            if not isinstance(given[1], FakeTensor):
                return stock(*given)
            key, recorder, now = _described((name or stock, *given)), self.recorder, self._now
            place = self._tracker.here()
            part = _OF_PHASE.get(place[0], WORKING)
            if key not in self.known:
                before, operator = len(recorder.calls) if recorder else 0, self._operator
                # One moment, as the next time: traces of a few layers meet it first in a layer of another kind.
                kept, self.peak, self.moments = (self.peak, self.moments), Peak(now), None
                result, passing = stock(*given), self.peak.bytes - now
                (self.peak, self.moments), self._operator = kept, operator
                self._seen(now + passing, part, place)
                forms = tree_map_only(torch.Tensor, form_of, result)
                self.known[key] = forms, passing, recorder.calls[before:] if recorder else []
                return result
            form, passing, calls = self.known[key]
            self._seen(now + passing, part, place)
            result = made(form, [given[1]])
            for tensor in tensors_of(result):
                self._made(tensor)
            if recorder:
                recorder.again(calls)
            return result

        return replacement

    def level(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        """Return a part of a step that returns nothing and holds as much as before: a chunk of the loss.

        Where it begins as an equal one did, with as much in memory, it is taken as known.
        """

        def replacement(*given: Any) -> None:
            key, recorder, now = (stock, self._now, self._tracker.here(), _described(given)), self.recorder, self._now
            if key in self.known:
                if recorder:
                    recorder.again(self.known[key][2])
                return
            before = len(recorder.calls) if recorder else 0
            stock(*given)
            if isinstance(given[1], FakeTensor) and self._now == now:
                self.known[key] = None, 0, recorder.calls[before:] if recorder else []

        return replacement

    def _joined(self, first: Any, second: Any) -> int | None:
        """Which of two gradients takes up the other, or None: where a tensor was used twice, autograd adds them.

        In place, where nothing else has the memory (`can_accumulate_inplace` in torch/csrc/autograd/input_buffer.cpp),
        but not while a dispatch mode such as this one looks on.
        """
        if torch.is_grad_enabled() or self._tracker.here()[0] != BACKWARD or not isinstance(second, torch.Tensor):
            return None
        if (first.shape, first.dtype, first.device) != (second.shape, second.dtype, second.device):
            return None
        alone = [_alone(one) for one in (first, second)]
        return alone.index(True) if any(alone) else None

    def hold(self, tensors: Iterable[torch.Tensor], part: str = WEIGHTS) -> None:
        """Count tensors that were there before."""
        for tensor in tensors:
            self._made(tensor, part)

    def begin_again(self) -> None:
        """Forget the moments until now, not what is there."""
        self.peak = Peak(self._now, dict(self._parts), self._tracker.here())
        self.moments = None if self.moments is None else {}

    def gradient(self, parameter: torch.Tensor, name: str) -> None:
        """A parameter's gradient is whole: count it as one, whatever made it."""
        self.trained.add(name)
        if parameter.grad is not None:
            self.belongs(parameter.grad, GRADIENTS)

    def belongs(self, tensor: torch.Tensor, part: str) -> None:
        """Count a tensor that is there as of `part`."""
        self._is(local(tensor).untyped_storage(), part)

    def sent(self, tensor: torch.Tensor) -> None:
        """Ranks send each other a tensor: count it as gathered, but for what stays from step to step."""
        self._made(tensor, GATHERED)
        storage = local(tensor).untyped_storage()
        if self._live.get(id(storage), (None, 0, WEIGHTS))[2] not in (WEIGHTS, STATE):
            self._is(storage, GATHERED)

    def resized(self, storage: torch.UntypedStorage, before: int) -> None:
        """A storage that is known has another size now; FSDP frees and takes back a block's whole weights so."""
        key = id(storage)
        if key not in self._live:
            return
        self._is(storage, GATHERED)
        reference, _, part = self._live[key]
        self._live[key] = (reference, storage.nbytes(), part)
        self._grow(storage.nbytes() - before, part)

    def place(self) -> tuple[str, str]:
        """Return phase and module that are at work."""
        return self._tracker.here()

    def kept(self, key: int, reference: Any) -> tuple[int, str]:
        """Return bytes and part of what was made, if it is still there."""
        known, size, part = self._live.get(key, (None, 0, ""))
        return (size, part) if known is reference else (0, "")

    def multiply(self, key: int, reference: Any, count: int) -> None:
        """Let what was made, if it is still there, count so often."""
        size, part = self.kept(key, reference)
        if size:
            self._live[key] = reference, size * count, part
            self._now += size * (count - 1)
            self._parts[part] += size * (count - 1)

    def _is(self, storage: torch.UntypedStorage, part: str) -> None:
        reference, size, before = self._live.get(id(storage), (None, 0, part))
        if before != part:
            self._parts[before] -= size
            self._parts[part] += size
            self._live[id(storage)] = (reference, size, part)

    def _made(self, tensor: torch.Tensor, part: str | None = None) -> None:
        storage = (tensor if type(tensor) is FakeTensor else local(tensor)).untyped_storage()
        key = id(storage)
        if key in self._live or tensor.device.type != self._device:
            return
        place, size = self._tracker.here(), storage.nbytes()
        part = part or self._part(tensor, place[0])
        # By storage, not by tensor: views share one, and it is freed with the last of them.
        self._live[key] = (weakref.ref(storage, lambda _: self._freed(key)), size, part)
        if self.loops is not None and self.loops.current is not None:
            self.loops.current.made.append((key, self._live[key][0]))
        self._grow(size, part, place)

    def _grow(self, size: int, part: str, place: tuple[str, str] | None = None) -> None:
        self._now += size
        self._parts[part] += size
        self._seen(self._now, part, place)

    def _seen(self, size: int, part: str, place: tuple[str, str] | None) -> None:
        """Keep a moment of `size` bytes, those besides what lives of `part`, where it is the highest."""
        highest, passing = size > self.peak.bytes, size - self._now
        if not highest and self.moments is None:
            return
        place = place or self._tracker.here()
        if highest:
            self.peak = Peak(size, self._parts | {part: self._parts[part] + passing}, place)
        if self.moments is not None:
            before = self.moments.get((place, self._operator))
            if before is None or size > before.bytes:
                parts = self._parts | {part: self._parts[part] + passing}
                self.moments[place, self._operator] = Peak(size, parts, place)

    def _freed(self, key: int) -> None:
        _, size, part = self._live.pop(key)
        self._now -= size
        self._parts[part] -= size

    def _part(self, tensor: torch.Tensor, phase: str) -> str:
        wide = self._vocabulary is not None and tensor.dim() > 1 and tensor.shape[-1] == self._vocabulary
        if wide and phase in (GENERATION, FORWARD, LOSS, BACKWARD):
            return LOGITS
        return _OF_PHASE.get(phase, WORKING)


def _described(value: Any) -> Any:
    """Return an argument of attention in blocks as a key of a dict, a tensor as what it is without numbers."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, (list, tuple)):
        return tuple(map(_described, value))
    if type(value).__module__.startswith(blockwise.__package__):  # the call, and its mask
        return (type(value), *map(_described, vars(value).values()))
    return value


def _alone(tensor: torch.Tensor) -> bool:
    """Whether a dense tensor shares its memory with no other one; the question itself holds the second reference."""
    count = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return bool(count <= 2 and (tensor.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(tensor)))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a sharded tensor that this rank holds; any other tensor as it is."""
    part: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def followed(
    step: TrainingStep,
    recorder: OperatorRecorder | None = None,
    device: str = "mps",
    moments: bool = False,
    trained: Collection[str] = (),
    accumulated: bool = False,
    loops: Loops | None = None,
) -> Memory:
    """Run a step STEPS times and return its memory, with the highest of all `moments` where they are asked for.

    Where the parameters that get a gradient are known (`trained`), the optimizer's state is made of gradients without
    a pass, and the step runs once. If batches before have `accumulated`, these gradients stay.
    """
    words, model, trainer = getattr(getattr(step.model, "config", None), "vocab_size", None), step.model, step.trainer
    memory = Memory(step.tracker, device, vocabulary=words if isinstance(words, int) and words > 64 else None)
    memory.moments, memory.recorder, memory.loops = {} if moments else None, recorder, loops
    memory.hold([*model.parameters(), *model.buffers(), *meta_model.statistics(model)])
    beside = getattr(trainer, "ref_model", None)  # a reference or a teacher, which is asked and does not learn
    beside = beside if isinstance(beside, torch.nn.Module) and beside is not model else None
    if beside is not None:
        memory.hold([*beside.parameters(), *beside.buffers()])
    weights = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}

    last = 1 if trained else STEPS

    def stepped(number: int = 0) -> None:
        for leaf in tensors_of(*trainer.optimizer.state.values()):
            memory.belongs(leaf, STATE)  # made in the backward pass, where weights step there
        if recorder and number < last:
            recorder.forget()
            memory.known.clear()

    def make_state() -> None:
        for name, parameter in weights.items():
            if name in trained:
                parameter.grad = torch.empty_like(parameter)
                memory.gradient(parameter, name)
        memory.trained.clear()
        trainer.optimizer.optimizer.step()  # not accelerate's, whose scaler would look for infinite gradients
        if not accumulated:
            model.zero_grad()
        stepped()
        memory.begin_again()

    stock = torch.UntypedStorage.resize_

    def resize_(storage: Any, size: int) -> Any:
        """A storage gets another size, which no operator tells of."""
        before = storage.nbytes()
        result = stock(storage, size)
        memory.resized(storage, before)
        return result

    with ExitStack() as hooks:
        hooks.enter_context(patch.object(torch.UntypedStorage, "resize_", resize_))
        if loops is not None:
            hooks.enter_context(loops.shortened(memory, model, beside))
        for name in ("_forward", "_backward"):
            part = memory.once(getattr(blockwise, name))
            hooks.enter_context(patch.object(blockwise, name, part))
        hooks.enter_context(patch.object(chunked, "_add_chunk", memory.level(chunked._add_chunk)))
        for name, parameter in weights.items():
            hook = partial(memory.gradient, name=name)
            hooks.callback(parameter.register_post_accumulate_grad_hook(hook).remove)
        # The second of two steps is the one that counts: in the first the optimizer has no moments yet.
        step.run(last, watch=[memory], after_step=stepped, before=make_state if trained else None)
    return memory


def _kinds(model: Any, cut: Cut | None, kept: Kept) -> dict[str, str]:
    """Return each parameter's name with its layer's kind in place of the number: one layer of a kind tells what trains.

    Without a cut each goes by its own name.
    """
    names = [name for name, _ in model.named_parameters()]
    return {name: cut.named(kept, name).replace(ADDED, "") if cut else name for name in names}


@dataclass(frozen=True)
class Estimate:
    """Bytes at the highest moment of a step of `rows` by `length`, in all and by part; `where` it is, in words.

    `length` is in tokens, None where rows have none; `width` says in words how wide rows are. `accumulation`
    micro-batches make one optimizer step.
    """

    rows: int
    length: int | None
    accumulation: int
    bytes: int
    parts: dict[str, int]
    where: str
    width: str = ""
    facts: dict[str, Choice[Any]] = field(default_factory=dict)
    trained: frozenset[str] = frozenset()
    """The parameters that got a gradient, as a further Tracer of these takes them."""
    recorded: OperatorRecorder | None = None
    """The operators of a step, where they were asked for."""
    moments: Mapping[Any, int] = field(default_factory=dict)
    """Bytes of the highest moment of each kind: the peak and all others."""


class Tracer:
    """Traces the steps of one target in batches of any size, and makes once what they share.

    With `record`, estimates have the operators of the first one's step. `trained` is what another estimate says of
    a model with the same weights: it saves half a trace.
    """

    def __init__(
        self,
        parts: prepare.Parts,
        device: Choice[str],
        length: int | None = None,
        record: bool = False,
        trained: Collection[str] = (),
    ) -> None:
        self._parts, self._device = parts, device
        # Once: a step sets the layers that it has to training, and those it lacks would be of another kind then.
        self._cut = layers.cut(*models_of(parts.prepared))
        self._record = record
        self._recorded: OperatorRecorder | None = None
        self.wide = batch.width(parts.whole, parts.prepared, length)
        self._loops: Loops | None = Loops()
        self._known: dict[int, Estimate] = {}
        self._trained: Collection[str] = trained
        self.rows = self._setting("per_device_train_batch_size", 32)
        self.accumulation = self._setting("gradient_accumulation_steps", 1)

    def __call__(self, rows: int | None = None) -> Estimate:
        """Return the estimate for a batch of `rows`, by default the recipe's."""
        rows = rows or self.rows
        if rows not in self._known:
            self._known[rows] = self._trace(rows)
        return self._known[rows]

    def largest(self, limit: int) -> int:
        """Return the most rows of a batch whose peak is within `limit` bytes, as `machine.largest` finds them."""
        kept = sum(self().parts.get(part, 0) for part in (WEIGHTS, GRADIENTS, STATE))
        return largest(lambda rows: self(rows).moments, limit, self.rows, kept)

    def _trace(self, rows: int) -> Estimate:
        try:
            step, moments = layers.told(lambda cut: self._shortest(rows, cut), self._cut)
        except Exception as error:
            if not needs_numbers(error):
                raise
            why = summary(error)
            raise RunError(f"this step reads values on its way, which a trace does not have: {why}") from error
        peak = highest(moments.values())
        phase, module = peak.where[0], family(peak.where[1])
        return Estimate(
            rows,
            self.wide.tokens,
            self.accumulation,
            peak.bytes,
            {part: size for part, size in peak.parts.items() if size},
            f"{phase}: {module}" if module else phase,
            str(self.wide),
            step.facts,
            frozenset(self._trained),
            self._recorded,
            {key: one.bytes for key, one in moments.items()},
        )

    def _shortest(self, rows: int, cut: Cut | None) -> tuple[TrainingStep, Mapping[Any, Peak]]:
        """Return `_moments` of a step with short loops, or where its model cannot do with those, with whole ones."""
        try:
            return self._moments(rows, cut)
        except Exception:  # what is no fault of the loops comes again
            if self._loops is None or not self._loops.left_out:
                raise
        self._loops = None
        return self._moments(rows, cut)

    def _moments(self, rows: int, cut: Cut | None) -> tuple[TrainingStep, Mapping[Any, Peak]]:
        """Return a step of so many rows and the highest of its moments of each kind.

        Those of a model with many layers that are alike are told by traces of a few, but not where a step generates:
        its keys and values are kept for as many layers as the configuration says.
        """
        if cut is not self._cut:
            self._cut, self._trained = cut, ()
        with layers.few(cut.base if cut else {}, *models_of(self._parts.prepared)):
            step = self._step(1, rows)
            kinds = _kinds(step.model, cut, cut.base if cut else {})
            trainable = {kinds[name] for name, one in step.model.named_parameters() if one.requires_grad}
        if generates(step.trainer):
            return step, self._of(None, rows, True) or {}
        if taken := not self._trained:  # for granted: most often all train
            self._trained = trainable
        if (found := self._of(cut, rows, taken=taken)) is None and cut:
            return self._moments(rows, None)
        return step, found or {}

    def _of(self, cut: Cut | None, rows: int, generating: bool = False, taken: bool = False) -> dict[Any, Peak] | None:
        """Return the highest moments, told by the layers of `cut` if that is given; None where those are not the same.

        A step that generates, of which its trainer keeps count, is run twice. With `taken` it begins again where others
        get a gradient than those that are known to train.
        """
        # Of many micro-batches the second is like all that follow: gradients are there, and activations again.
        several, recording = min(self.accumulation, 2), self._record and self._recorded is None
        whole = recording or generating
        found: list[Mapping[Any, Peak]] = []
        recorders = []
        for kept in (cut.base, *(kept for kept, _ in cut.more)) if cut else ({},):
            with layers.few(kept, *models_of(self._parts.prepared)):
                step = self._step(several if whole else 1, rows)
                recorders.append(OperatorRecorder(step.tracker))
                kinds = _kinds(step.model, cut, kept)
                learns = {name for name, kind in kinds.items() if not generating and kind in self._trained}
                recorder = recorders[-1] if recording else None
                before = several > 1 and not whole
                memory = followed(step, recorder, moments=True, trained=learns, accumulated=before, loops=self._loops)
            if taken and not found and (names := {kinds[name] for name in memory.trained}) != self._trained:
                self._trained = names
                return self._of(cut, rows)
            found.append(folded(memory.moments or {}, cut, kept) if cut else memory.moments or {})
        lacking = [lacking for _, lacking in cut.more] if cut else []
        made = scaled(found[0], list(zip(found[1:], lacking, strict=True)))
        if made is not None and recording:
            self._recorded = recorders[0].of_all(list(zip(recorders[1:], lacking, strict=True)))
        return made

    def _step(self, accumulation: int, rows: int) -> TrainingStep:
        changes = {"gradient_accumulation_steps": accumulation}
        return prepare.step(self._parts, self._device, fake=True, changes=changes, rows=rows, wide=self.wide)

    def _setting(self, name: str, default: int) -> int:
        settings = self._parts.prepared.arguments_defaults | dict(self._parts.recipe.training)
        return int(settings.get(name) or default)
