"""The store of activations: what is put comes back bit for bit, memory and files are bounded."""

from __future__ import annotations

import gc
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qgraph import InputError
from qgraph.activations import LIMIT, Activations

DTYPES = [np.float32, np.float16, np.float64, np.int64, np.uint8, np.bool_, ml_dtypes.bfloat16]


def bits(array: np.ndarray[Any, Any]) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def numbers(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> np.ndarray[Any, Any]:
    return (10 * np.random.default_rng(seed).standard_normal(shape)).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 4, 5), (7,), (), (0, 4)])
@pytest.mark.parametrize("limit", [0, LIMIT])
def test_arrays_come_back_bit_for_bit(
    tmp_path: Path, dtype: Any, shape: tuple[int, ...], limit: int
) -> None:
    array = numbers(shape, dtype)
    with Activations(limit, tmp_path) as store:
        store.put(0, "x", array)
        found = store.get(0, "x")
        assert (found.dtype, found.shape) == (array.dtype, array.shape)
        assert bits(found) == bits(array)
        in_a_file = limit == 0 and array.nbytes > 0
        assert len(list(tmp_path.rglob("*"))) == (2 if in_a_file else 0)


def test_nan_payloads_signed_zeros_and_other_layouts(tmp_path: Path) -> None:
    words = np.array([0x7FC00001, 0xFFC12345, 0x80000000, 0x00000001], np.uint32)
    turned = np.asfortranarray(numbers((5, 7), np.float32))
    with Activations(0, tmp_path) as store:
        store.put(0, "odd", words.view(np.float32))
        store.put(0, "turned", turned)
        store.put(0, "every second", turned[::2, 1:])
        assert bits(store.get(0, "odd")) == words.tobytes()
        np.testing.assert_array_equal(store.get(0, "turned"), turned)
        np.testing.assert_array_equal(store.get(0, "every second"), turned[::2, 1:])


def test_the_largest_go_first_then_the_oldest(tmp_path: Path) -> None:
    sizes = {"small": 10, "old": 100, "young": 100, "middle": 50}
    with Activations(1000, tmp_path) as store:
        for name, size in sizes.items():
            store.put(0, name, np.zeros(size, np.uint8))
        assert store.nbytes == 260
        order = []
        for limit in (259, 159, 59, 9):
            before = names_in_files(store, sizes)
            store.limit = limit
            store.put(1, "trigger", np.zeros(0))
            order += sorted(names_in_files(store, sizes) - before)
            assert store.nbytes <= limit
        assert order == ["old", "young", "middle", "small"]
        assert store.nbytes == 0


def names_in_files(store: Activations, names: Any) -> set[str]:
    return {name for name in names if isinstance(base(store.get(0, name)), np.memmap)}


def base(array: Any) -> Any:
    while isinstance(array, np.ndarray) and not isinstance(array, np.memmap):
        array = array.base
    return array


def test_drop_frees_memory_and_files(tmp_path: Path) -> None:
    with Activations(100, tmp_path) as store:
        for batch in range(3):
            store.put(batch, "kept", np.full(60, batch, np.uint8))
            store.put(batch, "gone", np.full(60, batch, np.uint8))
        kept = [store.get(batch, "gone") for batch in range(3)]
        (folder,) = tmp_path.iterdir()
        assert len(list(folder.iterdir())) == 5
        store.drop("gone")
        store.drop("never there")
        assert 2 <= len(list(folder.iterdir())) <= 3
        with pytest.raises(KeyError):
            store.get(0, "gone")
        assert [int(array[0]) for array in kept] == [0, 1, 2], "a dropped array was in use"
        store.put(0, "kept", np.full(60, 9, np.uint8))
        assert [int(store.get(batch, "kept")[0]) for batch in range(3)] == [9, 1, 2]


def test_torch_takes_what_comes_from_a_file(tmp_path: Path) -> None:
    with Activations(0, tmp_path) as store:
        store.put(0, "x", np.ones((2, 3), np.float32))
        shared = torch.from_numpy(store.get(0, "x"))
        shared += 1
        np.testing.assert_array_equal(store.get(0, "x"), 1, "the file was written to")


def test_the_folder_is_gone_at_the_end_on_errors_and_when_collected(tmp_path: Path) -> None:
    def filled() -> Activations:
        store = Activations(0, tmp_path)
        store.put(0, "x", np.ones(4))
        assert len(list(tmp_path.iterdir())) == 1
        return store

    with filled():
        pass
    assert not list(tmp_path.iterdir())
    with pytest.raises(ZeroDivisionError), filled() as store:
        1 / 0  # noqa: B018
    assert not list(tmp_path.iterdir())
    with pytest.raises(KeyError):
        store.get(0, "x")
    store.close()
    forgotten = filled()
    del forgotten
    gc.collect()
    assert not list(tmp_path.iterdir())


def test_nothing_is_made_where_memory_is_enough(tmp_path: Path) -> None:
    with Activations(folder=tmp_path / "not there") as store:
        store.put(0, "x", np.ones(1000))
        assert store.nbytes == 8000


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file of this process may be larger than 1 MB meanwhile: a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_names_folder_size_and_way_out(tmp_path: Path, small_files: None) -> None:
    array = np.ones(3_000_000, np.uint8)
    with Activations(2_000_000, tmp_path) as store:
        store.put(0, "fits", np.ones(1_000_000, np.uint8))
        with pytest.raises(InputError) as caught:
            store.put(7, "attention", array)
        words = str(caught.value)
        for part in ("3.0 MB", "attention, batch 7", str(tmp_path), "fewer --samples", "TMPDIR"):
            assert part in words
        (folder,) = tmp_path.iterdir()
        assert not list(folder.iterdir()), "half a file was left"
        assert bits(store.get(7, "attention")) == bits(array)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    store = Activations(0, tmp_path / "missing")
    with pytest.raises(InputError, match=r"missing: No such file or directory; make room"):
        store.put(0, "x", np.ones(4))


actions = st.tuples(
    st.sampled_from(["put", "get", "drop"]),
    st.integers(0, 2),
    st.sampled_from("abc"),
    st.integers(0, 40),
    st.sampled_from(range(len(DTYPES))),
)


@given(limit=st.integers(0, 200), steps=st.lists(actions, max_size=40))
def test_it_is_a_dictionary_with_a_limit(
    tmp_path_factory: pytest.TempPathFactory, limit: int, steps: list[Any]
) -> None:
    folder = tmp_path_factory.mktemp("store")
    model: dict[tuple[int, str], np.ndarray[Any, Any]] = {}
    with Activations(limit, folder) as store:
        for at, (action, batch, name, size, kind) in enumerate(steps):
            if action == "put":
                model[batch, name] = numbers((size,), DTYPES[kind], seed=at)
                store.put(batch, name, model[batch, name])
            elif action == "drop":
                model = {key: array for key, array in model.items() if key[1] != name}
                store.drop(name)
            elif (batch, name) in model:
                assert bits(store.get(batch, name)) == bits(model[batch, name])
            else:
                with pytest.raises(KeyError):
                    store.get(batch, name)
            files = [path for path in folder.rglob("*") if path.is_file()]
            assert store.nbytes <= limit
            assert store.nbytes + sum(p.stat().st_size for p in files) == sum(
                array.nbytes for array in model.values()
            )
    assert not list(folder.iterdir())
