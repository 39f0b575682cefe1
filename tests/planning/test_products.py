"""Products take what their shape takes on a GPU: tiles, waves, memory; attention has a share of its own. By hand."""

import json
from dataclasses import replace

import pytest

from gemini.planning.costs import Costs, Efficiency, occupied
from gemini.planning.hardware import load_hardware
from gemini.planning.parallel import breadth_first
from gemini.planning.trace import AttentionWork, MemoryTrace, Moment, Phase, Product, times
from gemini.tiers import Tier
from tests.planning.stacks import machine, stack_trace

SMS = 108
K = 4096
WAVE = SMS * 2 * 256 * 128 * K
FLAT = Efficiency(matrix=1.0, attention=0.5, attention_backward=0.25, gpu_memory=1.0)


def seconds(moment: Moment, efficiency: Efficiency = FLAT, **figures: float) -> float:
    """On a GPU of 1 TFLOP/s and, unless said otherwise, memory that takes no time."""
    hardware = machine("a data sheet", **{"gpu_bandwidth": 1e18, **figures})
    costs = Costs(hardware, efficiency, compute=Tier.GPU, precision="bf16", local_ranks=1)
    return costs.compute(moment, measured=False).seconds


def moment_of(*products: Product, **fields: int) -> Moment:
    flops = fields.pop("flops", 0) + sum(int(product.flops) for product in products)
    return Moment(Phase.FORWARD, "some", flops=flops, products=products, **fields)


# ---- tiles and waves -------------------------------------------------------------------------------------------------


def test_full_tiles_and_waves_are_the_work_alone() -> None:
    for product in (Product(1, 12 * 256, 9 * 128, K), Product(2, 9 * 128, 12 * 128, K), Product(3, 9 * 256, 512, K)):
        assert occupied(product, SMS) % WAVE == 0
        assert occupied(product, SMS) == product.flops


def test_a_row_more_than_the_tiles_of_a_wave_takes_another_wave() -> None:
    """108 tiles of 256 x 128 are one wave of the A100; one more is two, and so is all up to 216."""
    assert occupied(Product(1, 108 * 256, 128, K), SMS) == WAVE
    for rows in (108 * 256 + 1, 150 * 256, 216 * 256):
        assert occupied(Product(1, rows, 128, K), SMS) == 2 * WAVE
    assert occupied(Product(1, 1000 * 256 + 1, 128, K, times=7), SMS) == 7 * 10 * WAVE


def test_tiles_lie_as_they_cut_best() -> None:
    """128 columns: tiles of 256 x 128 are full, those of 128 x 256 half empty; and the other way round."""
    assert occupied(Product(1, 108 * 256, 128, K), SMS) == occupied(Product(1, 128, 108 * 256, K), SMS) == WAVE


def test_a_small_product_has_tiles_for_every_sm_or_its_inner_dimension_split() -> None:
    half = Product(1, 108 * 128, 128, K)  # 54 tiles of the largest size, 108 of 128 x 128
    assert occupied(half, SMS) == half.flops == WAVE / 2
    skinny = Product(1, 16, 64 * 64, K)  # 64 tiles of 64 x 64, a quarter of each full
    assert occupied(skinny, SMS) == 4 * skinny.flops


def test_without_sms_only_tiles_are_cut() -> None:
    assert occupied(Product(1, 109 * 256, 128, K), None) == Product(1, 109 * 256, 128, K).flops
    assert occupied(Product(5, 65, 64, K), None) == 5 * 2 * 128 * 64 * K


# ---- seconds ---------------------------------------------------------------------------------------------------------


def test_a_gpu_with_known_sms_takes_whole_waves() -> None:
    product = Product(1, 150 * 256, 128, K)
    assert seconds(moment_of(product), gpu_sms=SMS) == pytest.approx(2 * WAVE / 1e12)
    assert seconds(moment_of(product)) == pytest.approx(product.flops / 1e12)
    assert seconds(moment_of(product), replace(FLAT, matrix=0.5)) == pytest.approx(2 * product.flops / 1e12)


def test_a_skinny_product_waits_for_memory_beside_a_large_one() -> None:
    large, skinny = Product(1, 4096, 4096, 4096), Product(1, 64, 4096, 4096, times=2)
    num_bytes = 2 * 2 * (64 * 4096 + 4096 * 4096 + 64 * 4096)
    touched = num_bytes + 2 * 3 * 4096 * 4096
    apart = large.flops / 1e12 + num_bytes / 1e9
    assert skinny.flops / 1e12 < num_bytes / 1e9 and 2 * 3 * 4096 * 4096 / 1e9 < large.flops / 1e12
    assert seconds(moment_of(large, skinny, touched_bytes=touched), gpu_bandwidth=1e9) == pytest.approx(apart)
    more = moment_of(large, skinny, touched_bytes=touched + 10**9)  # of other operations, which run after them
    assert seconds(more, gpu_bandwidth=1e9) == pytest.approx(apart + 1)


def test_attention_has_shares_of_its_own_and_does_what_the_mask_leaves() -> None:
    work = 10**12
    forward = moment_of(flops=work, attention=AttentionWork(work, forward=work // 2))
    backward = moment_of(flops=work, attention=AttentionWork(work, backward=work))
    assert seconds(forward) == pytest.approx(0.5 / 0.5) and seconds(backward) == pytest.approx(1 / 0.25)
    assert seconds(forward, gpu_attention_share=0.25) == pytest.approx(2)
    assert seconds(backward, gpu_attention_backward_share=0.5) == pytest.approx(2)
    rest = moment_of(flops=3 * work, attention=AttentionWork(work, forward=work // 2))
    assert seconds(rest) == pytest.approx(1 + 2), "what has no shape is done at the speed of products"


def test_measured_speed_of_products_leaves_attention_as_much_slower() -> None:
    """A measured figure is of products: what their share of the peak is, is in it already."""
    work = 10**12
    moment = moment_of(flops=work, attention=AttentionWork(work, forward=work))
    costs = Costs(machine(), replace(FLAT, matrix=0.8), compute=Tier.GPU, precision="bf16", local_ranks=1)
    assert costs.compute(moment, measured=False).seconds == pytest.approx(0.8 / 0.5)


def test_launching_is_the_threads_and_no_part_of_what_the_gpu_takes() -> None:
    moment = moment_of(Product(1, 64, 64, 64), num_ops=4)
    assert seconds(moment, gpu_op_seconds=1e-3) == seconds(moment) < 1e-3
    figures = {"gpu_op_seconds": 1e-3, "hook_seconds": 1e-2}
    costs = Costs(machine(**figures), Efficiency(), compute=Tier.GPU, precision="bf16", local_ranks=1)
    assert costs.launching(moment, 3, measured=False) == pytest.approx(34e-3)
    assert costs.launching(replace(moment, seconds=1.0), 3, measured=True) == pytest.approx(30e-3)


def test_memory_bound_moments_take_what_memory_takes() -> None:
    assert seconds(moment_of(touched_bytes=10**9), gpu_bandwidth=1e9) == pytest.approx(1)


def test_the_host_knows_no_tiles() -> None:
    costs = Costs(machine(), Efficiency(), compute=Tier.CPU, precision="bf16", local_ranks=1)
    moment = moment_of(Product(1, 65, 65, 10**6), touched_bytes=1)
    without = replace(moment, products=())
    assert costs.compute(moment, measured=False) == costs.compute(without, measured=False)


@pytest.mark.parametrize("name, waves", [("dgx-a100", 5), ("dgx-h100", 4), ("rtx4090", 4), ("rtx3090", 7)])
def test_the_same_product_has_other_waves_on_other_gpus(name: str, waves: int) -> None:
    """4,096 x 4,096 is 512 tiles."""
    sms = int(load_hardware(name).figures["gpu_sms"].value)
    assert occupied(Product(1, 4096, 4096, K), sms) == waves * sms * 2 * 256 * 128 * K


# ---- traces ----------------------------------------------------------------------------------------------------------


def shaped() -> MemoryTrace:
    product, attention = Product(1, 1024, 512, 256, 2), AttentionWork(10**9, 6 * 10**8, 0)
    moments = [
        replace(moment, flops=int(product.flops) + 10**9, products=(product,), attention=attention)
        for moment in stack_trace(2).moments
    ]
    return replace(stack_trace(2), moments=tuple(moments))


def test_they_are_saved_and_older_files_are_read() -> None:
    trace = shaped()
    assert MemoryTrace.from_json(trace.to_json()) == trace
    body = json.loads(trace.to_json())
    at = body["moment_fields"].index("products")
    assert body["moment_fields"][at:] == ["products", "attention"]
    body["moment_fields"] = body["moment_fields"][:at]
    body["moments"] = [values[:at] for values in body["moments"]]
    older = MemoryTrace.from_json(json.dumps(body))
    assert older == replace(
        trace, moments=tuple(replace(m, products=(), attention=AttentionWork()) for m in trace.moments)
    )
    assert seconds(older.moments[0]) == pytest.approx(older.moments[0].flops / 1e12), "as it was predicted then"


def test_more_work_is_more_of_every_kind() -> None:
    trace = shaped()
    once = [seconds(moment, gpu_sms=SMS) for moment in trace.moments]
    thrice = breadth_first(trace, 3)
    assert [seconds(moment, gpu_sms=SMS) for moment in thrice.moments] == pytest.approx([3 * each for each in once])
    assert times(trace.moments[0], 2).products[0].flops == 2 * trace.moments[0].products[0].flops
