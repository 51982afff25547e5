"""The formats of other runtimes: GGUF, MLX, ONNX and Core ML. Their converters write, and each is opened again."""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy

from hf_mps.core.choice import Choice
from hf_mps.core.errors import RunError, UserError, user_path
from hf_mps.core.text import first_line, summary
from hf_mps.finetune.text.lengths import positions
from hf_mps.tools.export import base, merged
from hf_mps.tools.export.base import BF16, F16, F32, Q4, Q8, Comparison, Format, Job, Options, difference
from hf_mps.tools.saved.run import SavedRun

SCRIPT = "convert_hf_to_gguf.py"
# The script itself, and the names that distributions give it (containers/ramalama#2786 calls the second).
COMMANDS = (SCRIPT, "llama-convert-hf-to-gguf", "convert-hf-to-gguf")
UNKNOWN = re.compile(r"Model (\S+) is not supported|Architecture '?(\S+?)'? not supported")
ONNX_FILE = "model.onnx"
# How many of an input's dimensions vary from call to call, by the shape of the model: batch, choices, length; of other
# models it is two, batch and length.
AXES = {"choices": 3, "image": 1}


class GGUF(Format):
    """One file that llama.cpp's own converter writes and transformers' GGUF reader opens again.

    The `gguf` package reads and writes the container; which tensor of an architecture goes where, and how a tokenizer
    is stored, is known only to llama.cpp's `convert_hf_to_gguf.py`, which the package lacks.
    """

    name = "gguf"
    shapes = ("decoder",)
    weights = (BF16, F16, F32, Q8)
    default = "the converter's best 16 bits, from which llama-quantize makes smaller ones"
    modules = ("gguf",)
    packages = ("gguf",)

    def check(self, saved: SavedRun, options: Options) -> None:
        """Raise UserError where llama.cpp's converter is not to be found."""
        converter(options.converter)

    def write(self, job: Job, folder: Path) -> None:
        """Write one .gguf file into `folder`. Raises UserError for an architecture that llama.cpp does not know."""
        found = converter(job.options.converter)
        job.choices["converter"] = Choice(Path(found.value[-1]).name, found.reason)
        source = merged.plain_folder(job, folder.with_name(f"{folder.name}-plain"))
        folder.mkdir()
        kind = "q8_0" if job.weights == Q8 else job.weights  # llama.cpp's word
        words = [str(source), "--outfile", str(folder / f"{job.name}-{kind}.gguf"), "--outtype", kind]
        # The layer has no part in a conversion, and no name of ours is to be looked up on the hub.
        settings = os.environ | {"HF_MPS": "0", "HF_HUB_OFFLINE": "1"}
        command = [*found.value, *words, "--model-name", job.name]
        done = subprocess.run(command, env=settings, capture_output=True, text=True, check=False)
        if not done.returncode and any(folder.glob("*.gguf")):
            return
        lines = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        unknown = next((match for line in lines if (match := UNKNOWN.search(line))), None)
        if unknown is not None:
            name = unknown.group(1) or unknown.group(2)
            problem = f"{job.saved.where}: llama.cpp's converter does not know {name}"
            raise UserError(f"{problem}; next: hf-mps export mlx {shlex.quote(job.saved.where)} OUT")
        errors = [line for line in lines if "Error" in line] or lines or [f"exit code {done.returncode}"]
        raise RunError(f"llama.cpp's converter failed: {errors[-1]}; nothing was written")

    def compare(self, job: Job, folder: Path) -> Comparison:
        """Compare the logits of transformers' reader; not where that does not know the architecture."""
        import transformers

        [file] = folder.glob("*.gguf")
        opened_by = f"transformers {transformers.__version__}, whose reader dequantizes GGUF into PyTorch"
        dtype = "float32" if job.choices["compared in"].value == "float32" else "bfloat16"
        try:
            # Without device_map the reader dequantizes on the accelerator, and leaves the model there.
            opened = merged.opened(job, folder, dtype, gguf_file=file.name, device_map="cpu")
        except (ValueError, NotImplementedError, KeyError) as error:
            if "not supported" not in str(error):
                raise
            return Comparison(opened_by, not_compared=f"transformers reads no GGUF of this architecture ({error})")
        logits = base.logits(opened, job.batches)
        return Comparison(opened_by, difference(job.reference, logits, job.weights))


def converter(said: str | None) -> Choice[list[str]]:
    """Return the command of llama.cpp's converter: `said`, a script or llama.cpp's folder, or one on the PATH.

    Raises UserError where there is none.
    """
    if said is not None:
        path = user_path(said)
        script = path / SCRIPT if path.is_dir() else path
        if not script.is_file():
            raise UserError(f"--converter {said}: there is no {SCRIPT}; allowed: that file, or llama.cpp's folder")
        return Choice(_command(script), "--converter")
    for name in COMMANDS:
        if found := shutil.which(name):
            return Choice(_command(Path(found)), "on the PATH")
    raise UserError(
        f"export gguf needs llama.cpp's {SCRIPT}, which is not on the PATH; next:"
        " git clone https://github.com/ggml-org/llama.cpp, then the same command with --converter llama.cpp"
    )


def _command(script: Path) -> list[str]:
    """A Python script runs in this environment, whose torch and transformers it needs."""
    return [sys.executable, str(script)] if script.suffix == ".py" else [str(script)]


class MLX(Format):
    """A folder that mlx-lm converts and opens again; on Linux with MLX's CPU backend."""

    name = "mlx"
    shapes = ("decoder",)
    weights = (BF16, F16, F32, Q8, Q4)
    default = "the dtype that language models are published in; q4 takes a quarter of it"
    modules = ("mlx_lm",)
    packages = ("mlx", "mlx-lm")

    def check(self, saved: SavedRun, options: Options) -> None:
        """Raise UserError where MLX has no backend for this machine, or mlx-lm has no model of this architecture."""
        try:
            import mlx.core  # noqa: F401
            from mlx_lm.utils import _get_classes
        except ImportError as error:
            problem = f"export mlx: MLX does not load here: {first_line(error)}"
            raise UserError(f"{problem}; next: pip install 'mlx[cpu]' on Linux") from error
        config = saved.checkpoint.stored_config() or saved.checkpoint.config().to_dict()
        try:
            _get_classes(config)
        except ValueError as error:
            lacks = f"mlx-lm {metadata.version('mlx-lm')} has no model of the type {config.get('model_type')}"
            raise UserError(
                f"{saved.where}: {lacks}; next: hf-mps export merged {shlex.quote(saved.where)} OUT"
            ) from error

    def write(self, job: Job, folder: Path) -> None:
        """Let mlx-lm write `folder`: weights, configuration and tokenizer."""
        from mlx_lm import convert

        source = merged.plain_folder(job, folder.with_name(f"{folder.name}-plain"))
        bits = {Q8: 8, Q4: 4}.get(job.weights)
        dtype = "bfloat16" if bits else base.DTYPES[job.weights]
        convert(str(source), str(folder), dtype=dtype, quantize=bits is not None, q_bits=bits)

    def compare(self, job: Job, folder: Path) -> Comparison:
        """Open the folder with mlx-lm and compare its logits, computed in float32 from the weights as they are stored.

        MLX's CPU backend adds up a bfloat16 product of quantized weights in bfloat16 (mlx 0.32: 3 % off, 5e-7 in
        float32), which would be no fault of the export.
        """
        import mlx.core
        from mlx_lm.utils import load_model

        opened, _ = load_model(folder)
        opened.set_dtype(mlx.core.float32)
        batches = (mlx.core.array(batch["input_ids"].numpy()) for batch in job.batches)
        logits = [numpy.array(opened(ids).astype(mlx.core.float32)) for ids in batches]
        device = str(mlx.core.default_device().type).rpartition(".")[2].upper()
        versions = f"mlx-lm {metadata.version('mlx-lm')} with mlx {metadata.version('mlx')} on its {device}"
        return Comparison(versions, difference(job.reference, logits, job.weights))


def name_axes(graph: Any, names: Sequence[str]) -> None:
    """Name the axes of a graph's inputs that vary, in place: torch.export calls one batch s18 here and s41 there."""
    import onnx_ir

    named: dict[Any, str] = {}
    for given in graph.inputs:
        named |= {size: name for size, name in zip(given.shape or (), names, strict=False) if not isinstance(size, int)}
    for value in (*graph.inputs, *graph.outputs, *(made for node in graph for made in node.outputs)):
        if value.shape is not None:
            value.shape = onnx_ir.Shape([named.get(size, size) for size in value.shape])


class ONNX(Format):
    """A file of transformers' exporter, which uses torch.export; ONNX Runtime opens it again.

    optimum-onnx 0.1.0 asks for transformers below 4.58, so that it serves none that hf_mps runs with.
    """

    name = "onnx"
    shapes = ("encoder", "choices", "image", "sound", "decoder")
    weights = (F32,)
    default = "ONNX Runtime's CPU kernels compute in it"
    modules = ("onnx", "onnxscript", "onnxruntime")
    packages = ("onnxruntime", "onnx", "onnxscript", "transformers")

    def check(self, saved: SavedRun, options: Options) -> None:
        """Raise UserError where the installed transformers has no exporter."""
        try:
            import transformers.exporters  # noqa: F401
        except ImportError as error:
            version = metadata.version("transformers")
            needs = f"export onnx needs transformers' exporter, which {version} does not have"
            raise UserError(f"{needs}; next: pip install -U transformers") from error

    def write(self, job: Job, folder: Path) -> None:
        """Write model.onnx with its weights beside it, configuration, and tokenizer or processor."""
        from transformers.exporters import OnnxConfig, OnnxExporter

        model = merged.plain_model(job, folder.with_name(f"{folder.name}-plain"))
        # A batch of at least two rows: torch.export takes a dimension of one for a constant.
        import torch

        inputs = {name: torch.cat([rows, rows]) if len(rows) == 1 else rows for name, rows in job.batches[0].items()}
        if job.saved.task_class.shape == "decoder":
            # Keys and values would be inputs and outputs of the graph.
            model.config.use_cache = False
            job.choices["cache"] = Choice("none", "one graph gives the logits of every position, and keeps no keys")
        axes, dynamic = AXES.get(str(job.saved.task_class.shape), 2), torch.export.Dim.DYNAMIC
        varying = {name: dict.fromkeys(range(min(rows.dim(), axes)), dynamic) for name, rows in inputs.items()}
        exported = OnnxExporter().export(model, inputs, OnnxConfig(dynamic_shapes=varying))
        name_axes(exported.program.graph, ("batch", "choices", "sequence") if axes == 3 else ("batch", "sequence"))
        exported.save_pretrained(folder)
        base.copy_companions(job.saved, folder)

    def compare(self, job: Job, folder: Path) -> Comparison:
        """Open the file with ONNX Runtime on the CPU and compare its logits, batches of other sizes included."""
        import onnxruntime

        session = onnxruntime.InferenceSession(folder / ONNX_FILE, providers=["CPUExecutionProvider"])
        asked = [given.name for given in session.get_inputs()]
        found = []
        for batch in job.batches:
            fed = {name: batch[name].numpy() for name in asked}
            named = dict(zip([output.name for output in session.get_outputs()], session.run(None, fed), strict=True))
            found.append(base.masked(base.answered(named), batch))
        opened_by = f"onnxruntime {onnxruntime.__version__} on the CPU"
        return Comparison(opened_by, difference(job.reference, found, job.weights))


PACKAGE = "model.mlpackage"
LENGTHS = (32, 64, 128, 256, 512)
HIDDEN = -1e4
"""What a score gets where there is padding: float16, whose least number is -65504, holds a sum of two such."""
INPUTS = ("input_ids", "attention_mask", "token_type_ids")


class CoreML(Format):
    """An ML program for Apple's frameworks, whose inputs have one of a few lengths, converted from the traced encoder.

    Conversion runs on Linux too, but Core ML predicts on macOS alone: elsewhere the traced module answers in its place.
    """

    name = "coreml"
    shapes = ("encoder",)
    weights = (F16, F32)
    default = "the Neural Engine and Core ML's GPU path compute in it"
    modules = ("coremltools",)
    packages = ("coremltools",)

    def check(self, saved: SavedRun, options: Options) -> None:
        """Raise UserError for lengths that the model does not have."""
        if options.lengths is not None:
            if len(set(options.lengths)) < 2:
                raise UserError(f"--lengths {options.lengths[0]}: allowed: two lengths or more, such as 64,128")
            most = positions(saved.checkpoint.tokenizer(), saved.checkpoint.config())
            if over := [length for length in options.lengths if not 2 <= length <= most]:
                raise UserError(f"--lengths {over[0]}: allowed: 2 to {most}, the positions that this model has")

    def write(self, job: Job, folder: Path) -> None:
        """Write model.mlpackage, the configuration and the tokenizer. Raises UserError for what it cannot convert."""
        import coremltools

        lengths = _lengths(job)
        job.lengths = lengths.value
        names = [name for name in INPUTS if name in job.batches[0]]
        model = merged.plain_model(job, folder.with_name(f"{folder.name}-plain"))
        traced = job.traced = _traced(job, model, names, lengths.value[-1])
        job.choices["lengths"] = Choice(", ".join(map(str, lengths.value)), lengths.reason)
        job.choices["runs on"] = Choice("macOS 15, iOS 18", "before them Core ML takes one input of several lengths")
        shapes = [[1, length] for length in lengths.value]
        shape = coremltools.EnumeratedShapes(shapes, default=shapes[0])
        try:
            converted = coremltools.convert(
                traced,
                inputs=[coremltools.TensorType(name, shape, numpy.int32) for name in names],
                outputs=[coremltools.TensorType(name) for name in job.saved.task_class.outputs],
                convert_to="mlprogram",
                minimum_deployment_target=coremltools.target.macOS15,
                compute_precision=getattr(coremltools.precision, {F16: "FLOAT16", F32: "FLOAT32"}[job.weights]),
                skip_model_load=True,
            )
        except (NotImplementedError, ValueError, RuntimeError, TypeError, KeyError) as error:
            raise UserError(
                f"{job.saved.where}: coremltools {coremltools.__version__} does not convert"
                f" {type(model).__name__}: {summary(error)};"
                f" next: hf-mps export onnx {shlex.quote(job.saved.where)} OUT"
            ) from error
        folder.mkdir()
        converted.save(str(folder / PACKAGE))
        model.config.save_pretrained(folder)
        base.copy_companions(job.saved, folder)

    def compare(self, job: Job, folder: Path) -> Comparison:
        """Open the package again; compare Core ML's logits on macOS, and elsewhere those of what it was converted from.

        Raises RunError where the package does not have the inputs and lengths that it should.
        """
        import coremltools

        version = f"coremltools {metadata.version('coremltools')}"
        on_a_mac = platform.system() == "Darwin"
        opened = coremltools.models.MLModel(str(folder / PACKAGE), skip_model_load=not on_a_mac)
        description, asked = opened.get_spec().description, set(job.lengths)
        for given in description.input:
            array = given.type.multiArrayType
            found = {int(shape.shape[1]) for shape in array.enumeratedShapes.shapes} or {int(array.shape[1])}
            if found != asked:
                raise RunError(f"the package takes {given.name} of {sorted(found)} tokens, not {sorted(asked)}")
        if {given.name for given in description.output} != set(job.saved.task_class.outputs):
            raise RunError(f"the package gives {', '.join(given.name for given in description.output)}")
        if on_a_mac:
            return Comparison(f"{version} and Core ML", _difference(job, opened.predict, job.weights))

        def answer(inputs: dict[str, Any]) -> dict[str, Any]:
            import torch

            with torch.no_grad():
                found = job.traced(*(torch.from_numpy(rows) for rows in inputs.values()))
            return {name: output.numpy() for name, output in zip(job.saved.task_class.outputs, found, strict=True)}

        alike = f"{_same_weights(job, opened)} weights in the package"
        opened_by = f"{version}; the TorchScript that it converted was compared, and {alike}"
        why = f"Core ML predicts on macOS alone, and this is {platform.system()}"
        return Comparison(opened_by, _difference(job, answer, F32), why)


def _lengths(job: Job) -> Choice[tuple[int, ...]]:
    if job.options.lengths is not None:
        return Choice(tuple(sorted(set(job.options.lengths))), "--lengths; a text is padded to the next one")
    most = positions(job.tokenizer, base.plain(job.model).config)
    fitting = tuple(dict.fromkeys((*(length for length in LENGTHS if length < most), min(most, LENGTHS[-1]))))
    return Choice(fitting, "the default, within the model's positions; a text is padded to the next one")


def _traced(job: Job, model: Any, names: Sequence[str], length: int) -> Any:
    """Return the model as TorchScript with the inputs `names`, each of shape (1, length) and int32."""
    import torch

    class Encoder(torch.nn.Module):
        def __init__(self, added: bool) -> None:
            super().__init__()
            self.model, self.added = model, added

        def forward(self, *inputs: Any) -> Any:
            given = dict(zip(names, inputs, strict=True))
            # coremltools has no operators for the mask that transformers makes: the model gets a finished one.
            if self.added:
                hidden = (1.0 - given["attention_mask"].to(torch.float32)) * HIDDEN
                given["attention_mask"] = hidden[:, None, None, :]
            answer = self.model(**given)
            return tuple(getattr(answer, name) for name in job.saved.task_class.outputs)

    model.set_attn_implementation("eager")
    # The shortest row has the most padding, where a mask that is misunderstood shows.
    short = min(range(len(job.batches[0]["input_ids"])), key=lambda at: int(job.batches[0]["attention_mask"][at].sum()))
    padded = _padded({name: rows[short : short + 1] for name, rows in job.batches[0].items()}, length, job.tokenizer)
    given = tuple(padded[name] for name in names)
    with torch.no_grad():
        expected = base.answered(model(**padded))
        found = base.answered(dict(zip(job.saved.task_class.outputs, Encoder(True)(*given), strict=True)))
        # DeBERTa takes a finished mask for something else, and gets that of the tokens.
        added = numpy.allclose(found, expected, rtol=1e-3, atol=1e-5)
        trace: Any = torch.jit.trace
        return trace(Encoder(added).eval(), given, strict=False, check_trace=False)


def _padded(row: dict[str, Any], length: int, tokenizer: Any) -> dict[str, Any]:
    """Return one row without its padding, then padded to `length`, as int32; cut where it is longer."""
    import torch

    kept = min(length, int(row["attention_mask"].sum()))
    # The first token that is none of the padding, which some tokenizers put on the left.
    at = row["attention_mask"][0].argmax()
    padded = {}
    for name in INPUTS:
        if name in row:
            value = (tokenizer.pad_token_id or 0) if name == "input_ids" else 0
            # Core ML's inputs have no whole numbers of 64 bits.
            whole = torch.full((1, length), value, dtype=torch.int32)
            whole[0, :kept] = row[name][0, at : at + kept].to(torch.int32)
            padded[name] = whole
    return padded


def _same_weights(job: Job, opened: Any) -> int:
    """Return how many of the traced model's weights are in the package as they should be, rounded to its type.

    Raises RunError for one that is another, by more than one step of its type.
    """
    import coremltools

    # The default leaves out weights of fewer than 2,048 elements.
    stored = coremltools.optimize.coreml.get_weights_metadata(opened, weight_threshold=1)
    ending, width = ("_to_fp16", numpy.float16) if job.weights == F16 else ("", numpy.float32)
    alike, step = 0, numpy.finfo(width)
    for name, weight in job.traced.named_parameters():
        # coremltools calls them by their names in the model.
        found = stored.get(name.replace(".", "_") + ending)
        if found is None or found.val.shape != tuple(weight.shape):
            continue
        arrays = (found.val, weight.detach().numpy().astype(width))
        stored_as, rounded = (array.astype(numpy.float64) for array in arrays)
        # What float16 would round to 0 coremltools keeps as its least number (`_check_underflow_to_zero`).
        if not numpy.allclose(stored_as, rounded, rtol=float(step.eps), atol=float(step.smallest_subnormal)):
            raise RunError(f"the package holds another {name} than the model; nothing was written")
        alike += 1
    return alike


def _difference(job: Job, answer: Any, weights: str) -> Any:
    """Compare row by row, each padded to every length that it fits into."""
    ours, theirs = [], []
    for batch, reference in zip(job.batches, job.reference, strict=True):
        for at in range(len(reference)):
            row = {name: rows[at : at + 1] for name, rows in batch.items()}
            tokens = row["attention_mask"][0].numpy().astype(bool)
            for length in (length for length in job.lengths if length >= tokens.sum()):
                given = {name: tensor.numpy() for name, tensor in _padded(row, length, job.tokenizer).items()}
                logits = base.answered(answer(given))
                wanted = reference[at : at + 1]
                # These are logits of each token: those of padding are nobody's.
                if wanted.ndim == 3:
                    wanted, logits = wanted[:, tokens], logits[:, : tokens.sum()]
                ours.append(wanted)
                theirs.append(logits)
    return difference(ours, theirs, weights)
