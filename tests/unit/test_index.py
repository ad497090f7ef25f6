"""What a checkpoint's index says is right, or refused; and any part of a tensor can be read from any division of it."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from safetensors.torch import load_file

from wordrun.checkpoint import checksums, index, sharding as shardings, shards
from wordrun.checkpoint.folder import DamagedError
from wordrun.checkpoint.sharding import Cut, Sharding
from wordrun.checkpoint.shards import TensorShard
from wordrun.dist.mesh import Layout

Box = tuple[tuple[int, ...], tuple[int, ...]]


def divided(shape: tuple[int, ...], rng: random.Random, ranks: int = 3) -> list[Box]:
    """Return random boxes, offset and size, that together are ``shape``: rows by rank, and columns by another axis."""
    boxes: list[Box] = [((0,) * len(shape), shape)]
    for axis in range(min(2, len(shape))):
        cuts = sorted(rng.choices(range(shape[axis] + 1), k=ranks - 1))
        spans = list(zip([0, *cuts], [*cuts, shape[axis]], strict=True))
        boxes = [
            ((*at[:axis], low, *at[axis + 1 :]), (*size[:axis], high - low, *size[axis + 1 :]))
            for at, size in boxes
            for low, high in spans
        ]
    return boxes


def cut(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[tuple(slice(at, at + size) for at, size in zip(*box, strict=True))]


def written(tensors: dict[str, torch.Tensor], folder: Path, rng: random.Random) -> None:
    """Write the tensors as up to 9 ranks that divide each at random."""
    of_ranks: list[list[TensorShard]] = [[] for _ in range(9)]
    listed = {}
    for name, tensor in tensors.items():
        ranks, cuts = 1, []
        for axis in range(min(2, tensor.dim())):
            cuts.append(Cut(axis, rng.randint(1, 3), ranks))
            ranks *= cuts[-1].shards
        sharding, first = Sharding(tuple(tensor.shape), tuple(cuts)), rng.randrange(10 - ranks)
        listed[name] = index.StoredTensor(tensor.shape, tensor.dtype, sharding, first).plain()
        for number, box in ((number, sharding.box(number)) for number in range(ranks)):
            if box.numel or not tensor.numel():
                of_ranks[first + number].append(TensorShard(name, tensor.shape, box.offset, tensor[box.window]))
    for rank, mine in enumerate(of_ranks):
        shards.write(folder, mine, rank)
    (folder / index.INDEX).write_text(json.dumps(listed))


@pytest.mark.parametrize("seed", range(5))
def test_any_part_of_any_division_is_read(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    tensors = {
        "matrix": torch.randn(7, 5),
        "cube": torch.randn(4, 3, 2).bfloat16(),
        "vector": torch.arange(6),
        "number": torch.tensor(3.5, dtype=torch.float64),
        "turned": torch.randn(5, 8).T,
        "empty": torch.empty(0, 4),
        "flags": torch.tensor([True, False, True]),
        "complex": torch.randn(3, dtype=torch.complex64),
    }
    written(tensors, tmp_path, rng)
    stored = index.load(tmp_path)
    found = {name: stored[name].empty() for name in tensors}
    shards.read(tmp_path, found)
    assert all(found[name].equal(tensor) and found[name].dtype == tensor.dtype for name, tensor in tensors.items())
    for name, tensor in tensors.items():  # as a rank of another layout, into memory that is not contiguous
        for box in divided(tuple(tensor.shape), rng):
            into = torch.zeros(*box[1], 2, dtype=tensor.dtype)[..., 0]
            shards.read(tmp_path, {name: TensorShard(name, tensor.shape, box[0], into)}, stored)
            assert into.equal(cut(tensor, box)), (name, box)


def test_a_file_is_everyones(tmp_path: Path) -> None:
    """Other programs read it, and whoever may read the folder."""
    tmp_path.chmod(0o750)
    shards.write(tmp_path, [TensorShard("weight", torch.Size([2]), (0,), torch.ones(2))])
    assert load_file(tmp_path / "shards-00000.safetensors")["weight"].equal(torch.ones(2))
    assert (tmp_path / "shards-00000.safetensors").stat().st_mode & 0o777 == 0o640


def test_any_changed_byte_of_a_file_is_noticed(tmp_path: Path) -> None:
    """Also in the header, and a file that was cut or has grown."""
    weight = torch.randn(3, 2)
    shards.write(tmp_path, [TensorShard("weight", weight.shape, (0, 0), weight)])
    file = tmp_path / "shards-00000.safetensors"
    whole = file.read_bytes()
    assert checksums.problem(file) == checksums.problem(file, content=False) == ""
    for at in range(len(whole)):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert file.name in checksums.problem(file), at
    for other in (whole[:-1], whole + b"0", whole[:20], b""):
        file.write_bytes(other)
        assert file.name in checksums.problem(file, content=False)
    file.unlink()
    assert checksums.problem(file) == f"{file.name}: No such file or directory"


def test_two_stages_may_have_the_same_buffer(tmp_path: Path) -> None:
    for rank in range(2):
        shards.write(tmp_path, [TensorShard("buffer", torch.Size([2]), (0,), torch.ones(2))], rank)
    shards.write_index(tmp_path, range(2))
    shards.read(tmp_path, {"buffer": (found := torch.zeros(2))})
    assert found.equal(torch.ones(2))


def test_a_tensor_without_elements_is_written_once() -> None:
    tensors = {"empty": torch.empty(0, 3), "full": torch.ones(1)}
    names = [[shard.name for shard in shards.to_write(tensors, Layout(replicate=2), rank).shards] for rank in range(2)]
    assert sorted([*names[0], *names[1]]) == ["empty", "full"]


DIVIDED: dict[str, Any] = {"dtype": "float32", "shape": [4, 2], "first": 0, "cuts": [[0, 2, 1]]}


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("cuts", [[0, 4, 1]], r"weight is torch.float32 \[2, 2\], not .* \[1, 2\]"),
        ("cuts", [[1, 2, 1]], r"shards-00000.safetensors: weight is torch.float32 \[2, 2\], not .* \[4, 1\]"),
        ("cuts", [[2, 2, 1]], "the sharding of weight is invalid"),
        ("cuts", [[0, 0, 1]], "the sharding of weight is invalid"),
        ("cuts", [[0, 2**40, 1]], "the sharding of weight is invalid"),
        ("cuts", [[0, 2, 2**40]], "the sharding of weight is invalid"),
        ("cuts", [[0, 2, -1]], "contains an invalid size"),
        ("cuts", [[0, 2, 0]], "the sharding of weight is invalid"),
        ("cuts", [[0, 2, 1]] * 4, "the sharding of weight is invalid"),
        ("cuts", [0], "is not a list of sizes"),
        ("cuts", [[0]], "Cut"),
        ("cuts", 7, "not iterable"),
        ("first", 1, "shards-00002.safetensors: No such file"),
        ("first", 2**40, "the sharding of weight is invalid"),
        ("padded", [3, 2], "does not fit its padded shape"),
        ("padded", [4], "does not fit its padded shape"),
        ("padded", [9, 2], r"weight is torch.float32 \[2, 2\], not .* \[4, 2\]"),
        ("shape", [2**40, 2], "has the shape"),
        ("shape", [10**30, 2], "contains an invalid size"),
        ("shape", [True, 2], "contains an invalid size"),
        ("shape", "ab", "is not a list of sizes"),
        ("shape", [1] * 99, "is not a list of sizes"),
        ("dtype", "float64", "shards-00000.safetensors: weight is torch.float32"),
        ("dtype", "load", "is not a dtype of torch"),
    ],
)
def test_a_wrong_division_is_refused(name: str, value: Any, said: str, tmp_path: Path) -> None:
    weight = torch.randn(4, 2)
    for rank in range(2):
        half = weight[2 * rank : 2 * rank + 2]
        shards.write(tmp_path, [TensorShard("weight", weight.shape, (2 * rank, 0), half)], rank, {})
    (tmp_path / "tensors.json").write_text(json.dumps({"weight": DIVIDED}))
    found = index.load(tmp_path)["weight"].empty()
    shards.read(tmp_path, {"weight": found})
    assert found.equal(weight)
    (tmp_path / "tensors.json").write_text(json.dumps({"weight": {**DIVIDED, name: value}}))
    with pytest.raises(DamagedError, match=said):
        shards.read(tmp_path, {"weight": torch.empty(4, 2)})
    with pytest.raises(DamagedError):
        shards.read(tmp_path, {"weight": index.load(tmp_path)["weight"].empty()})


@given(st.data())
def test_boxes_of_a_grid_are_what_torch_divides(data: st.DataObject) -> None:
    """By one axis after the other; and the boxes that overlap a window are those that share elements with it."""
    shape = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))
    stride, cuts = 1, []
    for _ in range(data.draw(st.integers(0, 3))):
        cuts.append(Cut(data.draw(st.integers(0, len(shape) - 1)), data.draw(st.integers(1, 5)), stride))
        stride *= cuts[-1].shards
    sharding, numbers = Sharding(tuple(shape), tuple(cuts)), torch.arange(math.prod(shape)).view(shape)
    boxes = [sharding.box(rank) for rank in range(stride)]
    for rank, box in enumerate(boxes):
        mine = numbers
        for cut in cuts:
            pieces = [*mine.split(max(1, -(-mine.shape[cut.dim] // cut.shards)), cut.dim)]
            at = rank // cut.stride % cut.shards
            mine = pieces[at] if at < len(pieces) else mine.narrow(cut.dim, 0, 0)
        assert numbers[box.window].equal(mine)
    low = [data.draw(st.integers(0, size)) for size in shape]
    window = shardings.Box(
        tuple(low), tuple(data.draw(st.integers(0, n - at)) for at, n in zip(low, shape, strict=True))
    )
    wanted = set(numbers[window.window].flatten().tolist())
    found = dict(sharding.overlapping(window))
    assert all(box == boxes[rank] for rank, box in found.items())
    sharing = {rank for rank, box in enumerate(boxes) if wanted & set(numbers[box.window].flatten().tolist())}
    assert sharing <= found.keys()
    assert not wanted or sharing == found.keys()


def test_what_a_model_needs_and_a_checkpoint_lacks_is_named(tmp_path: Path) -> None:
    shards.write(tmp_path, [TensorShard("weight", torch.Size([2]), (0,), torch.ones(2))])
    shards.write_index(tmp_path)
    with pytest.raises(DamagedError, match=r"other is missing; expected \[3\]"):
        shards.read(tmp_path, {"other": torch.empty(3)})
    with pytest.raises(DamagedError, match=r"weight has the shape \[2\]; expected \[3\]"):
        shards.read(tmp_path, {"weight": torch.empty(3)})
