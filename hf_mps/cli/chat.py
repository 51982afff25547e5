"""`hf-mps chat`."""

from __future__ import annotations

from typing import Annotated

import typer

from hf_mps.cli.options import Debug, SavedModel, SavedTask, deferred
from hf_mps.core import status


@deferred
def chat(
    run: SavedModel,
    system: Annotated[str | None, typer.Option("--system", metavar="TEXT", help="The system prompt.")] = None,
    base: Annotated[
        bool, typer.Option("--base", help="Also let the model answer as it was before its training.")
    ] = False,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", min=1, help="The longest answer, in tokens.")
    ] = 512,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0.0, help="Above 0 answers are drawn; 0 takes the likeliest words.")
    ] = 0.0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="The seed of drawn answers.")] = 42,
    task: SavedTask = None,
    debug: Debug = False,
) -> None:
    """Talk with a saved instruction model, in the chat template of its training.

    The model remembers the conversation: /reset forgets it, /system TEXT changes the system prompt, /exit ends. Each
    line of a pipe is a turn, and stdout gets only the answers.

    Example: `hf-mps chat runs/sft/alpaca`
    """
    from hf_mps.tools.saved.run import open_run

    saved = open_run(run, task)
    with status.shown("loading PyTorch …"):
        from hf_mps.tools.saved.chat import Manner
        from hf_mps.tools.saved.chat import chat as talk

        talk(saved, Manner(max_new_tokens, temperature, seed), system=system, base=base)
