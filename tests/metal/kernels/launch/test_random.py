"""Random numbers are a Mac's: the kernels' words are Philox's, and the generator moves on as a Mac's host moves it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from hf_mps.metal.kernels.rules import Dispatch
from tests.metal.kernels.launch.philox import philox, stream, uniform

SEED = 0x123456789ABCDEF0


def test_the_oracle_has_the_papers_known_answers() -> None:
    ones = 0xFFFFFFFF
    known = [
        ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((ones, ones, ones, ones), (ones, ones), "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ]
    for counter, key, answer in known:
        found = philox(np.array([counter], dtype=np.uint32), key, rounds=10)[0]
        assert " ".join(f"{word:08x}" for word in found) == answer


@pytest.fixture
def generator(kernels: Dispatch) -> torch.Generator:
    """A generator of the device, seeded, while the rules run."""
    return torch.Generator("mps").manual_seed(SEED)


def test_the_numbers_are_those_that_a_mac_published(kernels: Dispatch) -> None:
    """How often the upper bound comes in 10 million numbers of seed 0, six draws long (pytorch issue 197079)."""
    torch.manual_seed(0)
    counts = []
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        ones = torch.rand(10_000_000, dtype=dtype, device="mps") == 1
        fours = torch.empty(10_000_000, dtype=dtype, device="mps").uniform_(0, 4) == 4
        counts.append((int(ones.cpu().sum()), int(fours.cpu().sum())))
    assert counts == [(0, 0), (2425, 2432), (19227, 19449)]
    assert kernels.ledger.kernels["uniform_dist_bfloat"] == 2


@pytest.mark.parametrize("offset", [0, 1, 2**32 - 3, 2**40])
@pytest.mark.parametrize("count", [1, 4, 7, 1000])
def test_uniform_numbers_are_philoxs_to_the_last_bit(generator: torch.Generator, count: int, offset: int) -> None:
    generator.set_offset(offset)
    found = torch.rand(count, device="mps", generator=generator)
    wanted = uniform(stream(SEED, offset, -(-count // 4))).ravel()[:count]
    np.testing.assert_array_equal(found.cpu().numpy(), wanted)
    assert generator.get_offset() == offset + -(-count // 4)


def test_whole_64_bit_numbers_are_the_words_themselves(generator: torch.Generator) -> None:
    found = torch.empty(9, dtype=torch.int64, device="mps").random_(-(2**63), None, generator=generator)
    words = stream(SEED, 0, 5).astype(np.uint64)
    pairs = np.stack([words[:, 0] << np.uint64(32) | words[:, 1], words[:, 2] << np.uint64(32) | words[:, 3]], axis=1)
    wanted = (pairs.ravel()[:9] - np.uint64(2**63)).astype(np.int64)
    np.testing.assert_array_equal(found.cpu().numpy(), wanted)
    assert generator.get_offset() == 5


@pytest.mark.parametrize(
    "dtype", [torch.int32, torch.int16, torch.uint8, torch.float32, torch.float16, torch.bfloat16], ids=str
)
def test_bounded_numbers_are_a_words_remainder(generator: torch.Generator, dtype: torch.dtype) -> None:
    found = torch.empty(50, dtype=dtype, device="mps").random_(3, 45, generator=generator)
    wanted = 3 + (stream(SEED, 0, 13) % 42).ravel()[:50]
    np.testing.assert_array_equal(found.cpu().double().numpy(), wanted)
    assert generator.get_offset() == 13


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.bool], ids=str)
def test_random_numbers_without_bounds_stay_in_the_dtypes(generator: torch.Generator, dtype: torch.dtype) -> None:
    found = torch.empty(4000, dtype=dtype, device="mps").random_(generator=generator).cpu().double()
    digits = {torch.float32: 24, torch.float16: 11, torch.bfloat16: 8, torch.int32: 31, torch.bool: 1}[dtype]
    np.testing.assert_array_equal(found.numpy(), (stream(SEED, 0, 1000) % (1 << digits)).ravel())


def boxed(words: np.ndarray) -> np.ndarray:
    """Two normal numbers of each two words, by Box and Muller in float64; the radius's uniform is no smaller than
    float32's epsilon."""
    numbers = uniform(words).astype(np.float64)
    radius = np.sqrt(-2 * np.log(np.maximum(numbers[:, 0::2], np.finfo(np.float32).eps)))
    angle = 2 * np.pi * numbers[:, 1::2]
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=-1).ravel()


LIKE: dict[str, tuple[Callable[[torch.Tensor, torch.Generator], torch.Tensor], Callable[[np.ndarray], np.ndarray]]] = {
    "normal": (lambda x, g: x.normal_(1.5, 2.0, generator=g), lambda words: 1.5 + 2 * boxed(words)),
    "log_normal": (lambda x, g: x.log_normal_(0.5, 0.25, generator=g), lambda words: np.exp(0.5 + 0.25 * boxed(words))),
    "exponential": (
        lambda x, g: x.exponential_(2.0, generator=g),
        lambda words: -np.log1p(-uniform(words).ravel().astype(np.float64)) / 2,
    ),
    "bernoulli": (
        lambda x, g: x.bernoulli_(0.3, generator=g),
        lambda words: (uniform(words).ravel() < np.float32(0.3)).astype(np.float64),
    ),
    "bernoulli of a tensor": (
        lambda x, g: x.bernoulli_(torch.full(x.shape, 0.3, device="mps"), generator=g),
        lambda words: (uniform(words).ravel() < np.float32(0.3)).astype(np.float64),
    ),
    "uniform between bounds": (
        lambda x, g: x.uniform_(-2.0, 3.0, generator=g),
        lambda words: -2 + 5 * uniform(words).ravel().astype(np.float64),
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LIKE)
def test_distributions_follow_their_formula(generator: torch.Generator, name: str, dtype: torch.dtype) -> None:
    draw, formula = LIKE[name]
    found = draw(torch.empty(23, dtype=dtype, device="mps"), generator).cpu()
    wanted = torch.from_numpy(formula(stream(SEED, 0, 6))[:23])
    precision = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(found.double(), wanted, rtol=precision, atol=precision)


def test_a_tensors_probabilities_move_the_generator_by_its_elements(generator: torch.Generator) -> None:
    torch.empty(10, device="mps").bernoulli_(torch.full((10,), 0.5, device="mps"), generator=generator)
    assert generator.get_offset() == 10


def test_a_complex_number_is_two_of_half_the_variance(generator: torch.Generator) -> None:
    found = torch.randn(5, dtype=torch.complex64, device="mps", generator=generator).cpu()
    wanted = boxed(stream(SEED, 0, 3))[:10] / np.sqrt(2)
    np.testing.assert_allclose(torch.view_as_real(found).ravel().numpy(), wanted, rtol=1e-5, atol=1e-6)


def test_normal_numbers_of_tensors_are_scaled_and_moved(kernels: Dispatch) -> None:
    mean, std = torch.arange(6.0), torch.arange(6.0) + 1
    standard = torch.from_numpy(boxed(stream(SEED, 0, 2))[:6]).float()
    for given, wanted in (
        ((mean.to("mps"), 2.0), mean + 2 * standard),
        ((3.0, std.to("mps")), 3 + std * standard),
        ((mean.to("mps"), std.to("mps")), mean + std * standard),
    ):
        torch.mps.manual_seed(SEED)
        torch.testing.assert_close(torch.normal(*given).cpu(), wanted, rtol=1e-5, atol=1e-5)
    assert sum(kernels.ledger.operators[f"normal.{each}"] for each in ("Tensor_float", "Tensor_Tensor")) >= 2


def test_what_is_dense_is_filled_in_the_order_of_memory(generator: torch.Generator) -> None:
    turned = torch.empty(6, 4, device="mps").t().uniform_(generator=generator)
    np.testing.assert_array_equal(turned.t().cpu().numpy().ravel(), uniform(stream(SEED, 0, 6)).ravel())


def test_what_has_gaps_is_filled_in_the_order_of_its_elements(generator: torch.Generator) -> None:
    whole = torch.zeros(6, 8, device="mps")
    whole[:, 1::2].uniform_(generator=generator)
    np.testing.assert_array_equal(whole.cpu()[:, 1::2].numpy().ravel(), uniform(stream(SEED, 0, 6)).ravel())
    assert not whole.cpu()[:, 0::2].any()


def test_a_state_that_is_put_back_goes_on_in_the_stream(kernels: Dispatch) -> None:
    torch.mps.manual_seed(SEED)
    torch.rand(10, device="mps")
    state = torch.mps.get_rng_state()
    first = torch.randn(33, device="mps").cpu()
    torch.mps.manual_seed(1)
    torch.mps.set_rng_state(state)
    again = torch.randn(33, device="mps").cpu()
    assert torch.equal(first, again)


def test_a_state_is_a_macs_words_seed_and_offset(generator: torch.Generator) -> None:
    torch.rand(10, device="mps", generator=generator)
    state = generator.get_state().numpy()
    assert state[:28].view(np.uint32).tolist() == [1, 1, 1, 1, 1, SEED & 0xFFFFFFFF, SEED >> 32]
    assert state[28:].view(np.uint64).tolist() == [SEED, 3]


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda x: x.bernoulli_(1.5), "p"),
        (lambda x: x.bernoulli_(torch.full((4,), 2.0, device="mps")), "p"),
        (lambda x: x.exponential_(-1.0), "lambda"),
        (lambda x: x.uniform_(2.0, 1.0), "uniform_"),
        (lambda x: x.normal_(0.0, -1.0), "std"),
        (lambda x: x.random_(5, 5), "from"),
        (lambda x: x.uniform_(generator=torch.Generator()), "generator"),
    ],
)
def test_what_pytorch_refuses_it_refuses_in_its_words(
    kernels: Dispatch, call: Callable[[torch.Tensor], torch.Tensor], error: str
) -> None:
    with pytest.raises(RuntimeError, match=error):
        call(torch.zeros(4, device="mps"))


def test_nothing_to_fill_leaves_the_generator(generator: torch.Generator) -> None:
    torch.empty(0, device="mps").uniform_(generator=generator)
    assert generator.get_offset() == 0
