"""The names that libraries do not promise to keep are there, and what replaces them works."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch
import torch.nn.functional as F
from torch.distributed import _functional_collectives, distributed_c10d, pipelining
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _python_dispatch

import wordrun
from wordrun import backend, dist
from wordrun.backend.base import BackendSpec
from wordrun.backend.deepspeed import compat as compat_deepspeed
from wordrun.backend.options import SCHEDULES
from wordrun.common.errors import ConfigError
from wordrun.config.rules import check
from wordrun.dist import torch_private
from wordrun.model.construction import meta_model
from wordrun.model.images import SyncBatchNorm

if TYPE_CHECKING:
    from conftest import Command

TIMED = (
    (_fsdp_collectives, "DefaultAllGather"),
    (_fsdp_collectives, "DefaultReduceScatter"),
    (FSDPModule, "set_custom_reduce_scatter"),
)
"""Which torch 2.8 does not have: FSDP's collectives are then not timed."""
REMEDY = "torch {} lacks {}: mend wordrun.{}, and note the versions in the module's docstring"


def remedy(name: str, function: str) -> str:
    """Return what to do if torch lacks ``name``; a ``function`` without a module is in ``torch_private``."""
    return REMEDY.format(torch.__version__, name, function if "." in function else f"torch_private.{function}")


@pytest.mark.parametrize(
    ("owner", "name", "function"),
    [
        (DTensor, "__create_chunk_list__", "shard_offset"),
        (torch.cpu, "_is_avx512_bf16_supported", "cpu_is_fast_at_bf16"),
        (torch.cpu, "_is_amx_tile_supported", "cpu_is_fast_at_bf16"),
        (torch.ops.mkldnn, "_is_mkldnn_bf16_supported", "cpu_is_fast_at_bf16"),
        (torch, "_foreach_mul_", "scale"),
        (torch.autograd.Variable._execution_engine, "queue_callback", "after_gradients"),
        (_functional_collectives, "AsyncCollectiveTensor", "waited"),
        (torch._C._distributed_c10d.Reducer, "prepare_for_backward", "settle_buckets"),
        (_python_dispatch, "_disable_current_modes", "hide_hooks"),
        (torch.Tensor, "_version", "version_of"),
        (_StridedShard(0, split_factor=2), "split_factor", "is_strided"),
        (torch.nn.Linear(1, 1), "_compiled_call_impl", "is_compiled"),
        (torch.nn.SyncBatchNorm, "_check_non_zero_input_channels", "check_channels"),
        (torch.cuda.memory, "_record_memory_history", "record_memory"),
        (torch.cuda.memory, "_dump_snapshot", "dump_memory"),
        (torch._C._distributed_c10d, "_dump_fr_trace_json", "flight_recorder.flight_records"),
        (distributed_c10d._world, "pg_names", "flight_recorder.group_members"),
        (distributed_c10d._world, "pg_group_ranks", "flight_recorder.group_members"),
        *(
            (owner, name, "time_collectives") for owner, name in TIMED if torch.__version__ >= "2.9"
        ),  # tried: 2.8 and 2.9
        *((torch.ops.aten, name, "PRODUCTS") for name in torch_private.PRODUCTS),
    ],
)
def test_torch_still_has_the_name(owner: object, name: str, function: str) -> None:
    assert hasattr(owner, name), remedy(name, function)


def test_the_reducer_is_an_attribute_that_can_be_released() -> None:
    names = DistributedDataParallel.__init__.__code__.co_names
    names += DistributedDataParallel._ddp_init_helper.__code__.co_names
    assert {"reducer", "logger"} <= {*names}, remedy("DDP.reducer", "release_reducer")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_are_public_under_their_names(schedule: str) -> None:
    assert hasattr(pipelining, f"Schedule{schedule}")


def test_a_pipeline_returns_nothing_where_it_can_be_asked_to() -> None:
    asked: list[bool | None] = []

    class Older:
        def step(self, *inputs: object, target: object = None) -> None:
            asked.append(None)

    class Newer:
        def step(self, *inputs: object, target: object = None, return_outputs: bool = True) -> None:
            asked.append(return_outputs)

    for schedule in (Older(), Newer()):
        torch_private.pipeline_step(schedule, "inputs", target="targets")
    assert asked == [None, False]


def test_an_error_of_the_compiler_is_recognised() -> None:
    name = "torch._dynamo.exc.BackendCompilerFailed"
    error = importlib.import_module("torch._dynamo.exc").BackendCompilerFailed(torch.compile, ValueError("g++"), None)
    assert torch_private.is_compile_error(error), remedy(name, "is_compile_error")
    assert not torch_private.is_compile_error(ValueError())


def test_tensors_are_scaled() -> None:
    tensors = [torch.ones(2), torch.full((1,), 4.0)]
    torch_private.scale(tensors, torch.tensor(0.5))
    assert [tensor.tolist() for tensor in tensors] == [[0.5, 0.5], [2.0]]


def test_without_the_names_a_processor_counts_as_slow_at_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cpu, "_is_avx512_bf16_supported")
    monkeypatch.delattr(torch.cpu, "_is_amx_tile_supported")
    assert torch_private.cpu_is_fast_at_bf16() is False


def test_a_limit_on_instructions_counts(command: Command) -> None:
    """In a process of its own: torch 2.8 reads the limit when it is imported."""
    code = "from wordrun.dist import torch_private; print(torch_private.cpu_is_fast_at_bf16())"
    assert command(sys.executable, "-c", code, ONEDNN_MAX_CPU_ISA="AVX2").stdout == "False\n"


@pytest.mark.skipif(
    not importlib.util.find_spec("deepspeed"), reason="needs DeepSpeed: pip install 'wordrun[deepspeed]'"
)
def test_deepspeed_still_has_the_names_and_what_it_patches_comes_back() -> None:
    for module, names in (compat_deepspeed.DEEPSPEED | compat_deepspeed.DEEPSPEED_STATE).items():
        for name in names:
            found = hasattr(importlib.import_module(module), name)
            assert found, (
                f"{module} has no {name} any more: mend deepspeed/compat.py, and note the version in its docstring"
            )
    linear = F.linear
    with contextlib.ExitStack() as undo:
        compat_deepspeed.restore_after_deepspeed(undo, rank=0)
        F.linear = lambda *args: None  # type: ignore[assignment]
    assert F.linear is linear


@pytest.mark.parametrize(
    ("version", "tensor_parallel", "zbv", "functions"),
    [
        ("2.8.0+cpu", False, False, False),
        ("2.10.0", False, False, False),
        ("2.11.0", True, False, False),
        ("2.12.1", True, True, False),
        ("2.13.1", True, True, True),
    ],
)
def test_pipelines_are_for_versions_that_were_right(
    version: str, tensor_parallel: bool, zbv: bool, functions: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(version))
    assert torch_private.pipeline_takes_tensor_parallel() is tensor_parallel
    assert torch_private.zbv_runs_on_cpus() is zbv
    assert torch_private.zero_bubble_takes_functions() is functions


def test_tables_of_several_sizes_are_for_versions_that_tell_them_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = wordrun.compose(["data=sample", "model=modern", "model.ngram_rows=[31,15]"])
    model = meta_model(cfg.model, 64)
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.10.0"))
    with pytest.raises(ConfigError, match=r"ngram_rows=\[31, 15\] on tensor-parallel ranks needs torch 2\.11 or newer"):
        model.tensor_parallel_plan()
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.11.0"))
    assert "ngrams.1" in model.tensor_parallel_plan()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["train.backend=3D"], r"backend\.tp=2 in a pipeline needs torch 2\.11 or newer"),
        (
            ["train.backend=PP", "backend.schedule=ZBVZeroBubble"],
            r"ZBVZeroBubble on CPUs needs torch 2\.12 or newer, not",
        ),
        (
            ["train.backend=PP", "backend.schedule=InterleavedZeroBubble", "train.chunked_loss=true"],
            r"train\.chunked_loss=true with backend\.schedule=InterleavedZeroBubble needs torch 2\.13 or newer, not",
        ),
    ],
)
def test_what_an_older_torch_does_wrong_is_refused(
    words: list[str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.10.0"))
    model = ["model.n_layer=16", "model.vocab_size=64", "model.batch_size=8"]
    cfg = wordrun.compose(["data=sample", *model, *words], ranks=8)
    spec = BackendSpec(cfg, dist.World(size=8, device="cpu"), check(cfg, 8), partial(meta_model, cfg.model, 64), print)
    with pytest.raises(ConfigError, match=says):
        backend.build(spec)


def test_a_batch_norm_can_be_torchs_synchronized_one() -> None:
    """Without a process group, where it normalizes its own batch."""
    x = torch.randn(4, 3, 5, 5)
    ours, theirs = SyncBatchNorm(3), torch.nn.BatchNorm2d(3)
    assert torch.equal(torch_private.sync_batch_norm(ours, x), theirs(x))
    assert ours.running_mean is not None
    assert torch.equal(ours.running_mean, theirs.running_mean)  # type: ignore[arg-type]


@pytest.mark.usefixtures("torchvision")
def test_torchvision_can_be_imported_beside_any_torch(command: Command) -> None:
    script = (
        "from wordrun.dist.torch_private import torchvision\n"
        "print(torchvision('models', 'this test').resnet18.__name__)"
    )
    assert command(sys.executable, "-c", script).stdout == "resnet18\n"
