"""Every test here has Metal (simulated or real), the layer's fallbacks on, and nothing said yet."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    import torch

    from hf_mps.core import notices
    from hf_mps.metal import fallback
    from hf_mps.metal.fallback import registration

    if torch.mps.device_count() == 0 or fallback.mode() is None:
        pytest.skip("needs Metal, a simulated one or a Mac's, with the layer on")
    fallback.reset()
    notices.forget()
    yield
    registration.stop()
    registration.start()


@pytest.fixture(params=["copied", "shared"])
def way(request: pytest.FixtureRequest) -> str:
    """Both ways, for tensors of any size."""
    from hf_mps.metal.fallback import registration

    registration.stop()
    registration.start(share=request.param == "shared", small=-1)
    return str(request.param)
