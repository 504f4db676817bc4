"""Partial updates, compared with plain numpy, in every encoding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from potluck.common.errors import LayoutError
from potluck.common.tensors.encoding import EncodedUpdate, Encoding, encode, encoded_layout
from potluck.common.tensors.layout import Layout
from potluck.common.tensors.tensor_files import NamedTensors
from potluck.server.reduce.reduction import reduce
from potluck.server.reduce.update_files import PartialUpdate, renormalized, shares_sent
from potluck.server.reduce.update_norms import update_norms
from potluck.server.strategy import Combine

Arrays = dict[str, NDArray[Any]]
SHAPES = {"a": (3, 50), "b": (1,), "c": (200,), "d": (), "e": (7, 5)}


def arrays(seed: int) -> Arrays:
    generator = np.random.default_rng(seed)
    made = {name: generator.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
    return {**made, "count": np.array([seed])}


def tensors(named: Arrays, layout: Layout | None = None) -> NamedTensors:
    return NamedTensors(layout=layout or Layout.of(named), arrays=named)


MODEL = tensors(arrays(0))


def sent(seed: int, dropped: set[str], encoding: Encoding, *, delta: bool) -> PartialUpdate:
    left = {name: array for name, array in arrays(seed).items() if name not in dropped}
    file = encode(
        left,
        encoding,
        base=MODEL.arrays if delta else None,
        generator=np.random.default_rng(seed),
    )
    layout = encoded_layout(Layout.of(left), encoding)
    return PartialUpdate(tensors(file, layout), MODEL, dropped, encoding, delta=delta)


some = st.sets(st.sampled_from(sorted(SHAPES)), max_size=4)


@given(some, st.sampled_from(Encoding), st.booleans(), st.data())
@settings(max_examples=60, deadline=None)
def test_tensors_missing_from_an_update_are_unchanged(
    dropped: set[str], encoding: Encoding, delta: bool, data: st.DataObject
) -> None:
    update = sent(3, dropped, encoding, delta=delta)
    decoded = update.decode_to_arrays()
    assert update.layout == MODEL.layout
    update.check_numbers()
    for name, array in decoded.items():
        if name in dropped:
            assert (array == MODEL.arrays[name]).all()
        elif name == "count":
            assert array == [3]
        else:
            np.testing.assert_allclose(array, arrays(3)[name], atol=0.05)
    whole = np.concatenate([decoded[name].reshape(-1) for name in SHAPES])
    begin = data.draw(st.integers(0, len(whole) - 1))
    end = data.draw(st.integers(begin + 1, len(whole)))
    block = update.block(begin, end, np.empty(end - begin + 3, np.float32))
    assert (block == whole[begin:end]).all()


@given(
    st.lists(some, min_size=1, max_size=4),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**32),
)
@settings(max_examples=60, deadline=None)
def test_each_tensor_is_averaged_over_the_updates_that_contain_it(
    dropped: list[set[str]], difference: bool, by_tensor: bool, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    count = len(dropped)
    weights = generator.integers(1, 9, count).astype(np.float64)
    weights /= weights.sum()
    own = generator.dirichlet(np.ones(count))
    combine = Combine(
        weights=weights, difference=difference, tensor_weights={"c": own} if by_tensor else {}
    )
    updates: list[EncodedUpdate | Any] = [
        sent(number + 1, names, Encoding.FLOAT32, delta=False)
        for number, names in enumerate(dropped)
    ]
    found = reduce(updates, renormalized(combine, dropped), MODEL)
    for name in SHAPES:
        those = [number for number in range(count) if name not in dropped[number]]
        factors = own if by_tensor and name == "c" else weights
        base = MODEL.arrays[name].astype(np.float64)
        expected = np.zeros_like(base)
        for number in those:
            step = arrays(number + 1)[name] - base
            expected = expected + factors[number] / factors[those].sum() * step
        np.testing.assert_allclose(
            found[name], expected if difference else base + expected, atol=1e-6
        )


def test_weights_are_unchanged_when_every_update_has_all_tensors() -> None:
    combine = Combine(weights=np.array([0.5, 0.5]))
    assert renormalized(combine, [(), ()]) is combine


def test_tensor_sent_only_by_an_update_of_weight_zero_is_unchanged() -> None:
    combine = Combine(weights=np.array([0.0, 1.0]))
    updates = [sent(1, set(), Encoding.FLOAT32, delta=False)]
    updates.append(sent(2, {"a"}, Encoding.FLOAT32, delta=False))
    found = reduce(updates, renormalized(combine, [(), ("a",)]), MODEL)
    assert (found["a"] == MODEL.arrays["a"]).all()
    assert (found["c"] == arrays(2)["c"]).all()


def test_update_norm_covers_only_the_tensors_sent() -> None:
    update = sent(1, {"a", "e"}, Encoding.FLOAT32, delta=False)
    moves = [
        (arrays(1)[name] - MODEL.arrays[name].astype(np.float64)).reshape(-1) for name in "bcd"
    ]
    [norm] = update_norms([update], MODEL)
    assert norm == pytest.approx(np.linalg.norm(np.concatenate(moves)))


def test_share_sent_counts_numbers_and_not_tensors() -> None:
    shares = shares_sent(MODEL.layout, [("a", "e"), ()])
    assert shares.tolist() == pytest.approx([202 / 387, 1.0])


def test_update_file_with_a_tensor_that_must_be_dropped_is_refused() -> None:
    with pytest.raises(LayoutError, match="'a' is not in the model"):
        PartialUpdate(tensors(arrays(1)), MODEL, {"a"}, Encoding.FLOAT32, delta=False)
