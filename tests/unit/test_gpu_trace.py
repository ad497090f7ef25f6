"""The summary of a profiler's trace in benchmarks/gpu.py."""

import json
from pathlib import Path

import pytest

from gpu_trace import flops_of, kind_of, summarize

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT", "matrix products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "matrix products"),
        ("triton_tem_fused_mm_3", "matrix products"),
        ("void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd<64, cutlass::bfloat16_t>>", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16", "attention"),
        ("void at::native::multi_tensor_apply_kernel<Metadata<4>, FusedAdamMathFunctor<float, 4>>", "optimizer"),
        ("void at::native::multi_tensor_apply_kernel<Metadata<1>, LpNormFunctor<float>>", "gradient norm and clipping"),
        ("triton_red_fused__log_softmax__to_copy_nll_loss_forward_2", "loss"),
        ("triton_per_fused__to_copy_add_native_layer_norm_mm_1", "norms"),
        ("triton_poi_fused__to_copy_0", "copies and fills"),
        ("triton_poi_fused_add_gelu_mm_4", "elementwise and other"),
        ("Memcpy HtoD (Pinned -> Device)", "copies and fills"),
    ],
)
def test_kinds_of_kernels(kernel: str, kind: str) -> None:
    assert kind_of(kernel) == kind


def test_flops_of_a_product_ignore_its_bias_and_its_output() -> None:
    assert flops_of("aten::mm", [[8, 4], [4, 2], [8, 2]]) == 2 * 8 * 4 * 2
    assert flops_of("aten::addmm", [[2], [8, 4], [4, 2], [], [], [8, 2]]) == 2 * 8 * 4 * 2
    assert flops_of("aten::bmm", [[3, 8, 4], [3, 4, 2]]) == 3 * 2 * 8 * 4 * 2
    assert flops_of("aten::linear", [[8, 4], [2, 4]]) == 0


def test_busy_time_counts_overlapping_kernels_once(tmp_path: Path) -> None:
    def kernel(name: str, ts: float, dur: float, operator: int) -> dict[str, object]:
        args = {"External id": operator}
        return {"ph": "X", "cat": "kernel", "name": name, "ts": ts, "dur": dur, "args": args}

    operator = {"External id": 7, "Input Dims": [[8, 4], [4, 2]]}
    events = [
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 1, "args": operator},
        kernel("nvjet_a", 1000, 2000, 7),
        kernel("triton_poi_fused_add_0", 2000, 2000, 8),
        kernel("triton_poi_fused_add_0", 6000, 1000, 8),
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    summary = summarize(path, steps=2)
    assert (summary.busy_ms, summary.window_ms, summary.launches) == (2.0, 3.0, 1.5)
    assert summary.kinds == [("elementwise and other", 1.5), ("matrix products", 1.0)]
    assert [(row.ms, row.calls) for row in summary.kernels] == [(1.5, 1.0), (1.0, 0.5)]
    assert summary.products[0].flops == 8 * 4 * 2  # two steps, one product
