import pytest

from tenuto.core.errors import ConfigError
from tenuto.sim.cost import default_backend, load_step_cost, tables
from tenuto.sim.cost.batch import (
    HostedStepCost,
    HostOverhead,
    ScaledStepCost,
    StepBatch,
    StepCost,
)
from tenuto.sim.hardware.gpus import GPUS
from tenuto.sim.hardware.models import load_model


class TenMilliseconds(StepCost):
    """A GPU whose steps all take 10 ms."""

    def seconds(self, batch: StepBatch) -> float:
        return 0.010


def test_the_sums_of_a_batch_by_hand() -> None:
    batch = StepBatch.of(prefills=[(100, 0), (16, 300)], decodes=[7, 50])
    # Pairs: 100 x (0 + 50) + 16 x (300 + 8) = 5,000 + 4,928.
    assert batch == StepBatch(
        num_prefills=2,
        num_prefill_tokens=116,
        num_prefill_context_tokens=300,
        num_prefill_pairs=9928.0,
        num_decodes=2,
        num_decode_context_tokens=57,
    )


def test_chunks_of_one_sequence_visit_the_pairs_of_the_whole() -> None:
    whole = StepBatch.of(prefills=[(1000, 0)]).num_prefill_pairs
    assert sum(StepBatch.of(prefills=[(250, c)]).num_prefill_pairs for c in (0, 250, 500, 750)) == whole


@pytest.mark.parametrize(("prefills", "decodes"), [([(0, 5)], []), ([(1, -1)], []), ([], [-1])])
def test_negative_sizes_are_refused(prefills: list[tuple[int, int]], decodes: list[int]) -> None:
    with pytest.raises(ConfigError, match="1 token or more"):
        StepBatch.of(prefills, decodes)


def test_a_synchronous_host_adds_its_time() -> None:
    cost = HostedStepCost(TenMilliseconds(), HostOverhead(per_step_s=0.001, per_request_s=0.0001))
    # 10 ms of operators make 11 ms of a prefill step, + 1 ms + (1 chunk + 2 decodes) x 0.1 ms of the host.
    assert cost.seconds(StepBatch.of([(8, 0)], [1, 1])) == pytest.approx(0.0123)
    # And 10.8 ms of a decode step, + 1 ms + 2 x 0.1 ms.
    assert cost.seconds(StepBatch.of(decodes=[1, 1])) == pytest.approx(0.012)


def test_an_asynchronous_host_hides_behind_the_gpu_until_it_is_the_slower_one() -> None:
    cost = HostedStepCost(
        TenMilliseconds(), HostOverhead(per_step_s=0.001, per_request_s=0.0001, overlapped=True)
    )
    assert cost.seconds(StepBatch.of(decodes=[1] * 10)) == pytest.approx(0.0108)
    # 1 ms + 120 x 0.1 ms = 13 ms of host work.
    assert cost.seconds(StepBatch.of(decodes=[1] * 120)) == pytest.approx(0.013)


def test_an_empty_step_takes_no_time() -> None:
    assert HostedStepCost(TenMilliseconds(), HostOverhead()).seconds(StepBatch.of()) == 0.0


def test_the_backend_is_named_and_checked() -> None:
    gpu, model = GPUS["RTX5090"], load_model("llama-3.1-8b")
    with pytest.raises(ConfigError, match="'oracle'; choose one of tables, roofline"):
        load_step_cost("oracle", gpu, model)
    with pytest.raises(
        ConfigError, match="no measured tables for RTX5090; choose one of RTXPRO6000, A100-80"
    ):
        load_step_cost("tables", gpu, model)
    with pytest.raises(ConfigError, match=r"llama-3\.1-8b is float32; .* give --dtype bfloat16$"):
        load_step_cost("roofline", gpu, load_model("llama-3.1-8b", dtype="float32"))
    batch = StepBatch.of(decodes=[100])
    slow_host = HostOverhead(per_step_s=1.0)
    added_s = load_step_cost("roofline", gpu, model, host=slow_host).seconds(batch)
    added_s -= load_step_cost("roofline", gpu, model).seconds(batch)
    assert added_s == pytest.approx(1.0 - HostOverhead().per_step_s)


def test_tables_are_the_default_only_where_they_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    for installed, expected in (("0.12.0", "tables"), ("0.11.0", "roofline"), (None, "roofline")):
        monkeypatch.setattr("tenuto.sim.cost.installed_version", lambda installed=installed: installed)
        assert default_backend(GPUS["H200"]) == expected
        assert default_backend(GPUS["RTX5090"]) == "roofline"


def test_a_missing_or_other_package_version_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "installed_version", lambda: None)
    with pytest.raises(ConfigError, match=r"need aiconfigurator-core==0\.12\.0, not None"):
        tables.AiconfiguratorTables(GPUS["H200"], load_model("llama-3.1-8b"), 1)


class GrowingSteps(StepCost):
    """A GPU whose steps grow with the contexts of their decodes."""

    def seconds(self, batch: StepBatch) -> float:
        return 0.010 + 1e-7 * batch.num_decode_context_tokens


@pytest.mark.parametrize("overlapped", [True, False])
@pytest.mark.parametrize("num_decodes", [1, 7, 400])
def test_a_stretch_is_priced_as_its_steps(num_decodes: int, overlapped: bool) -> None:
    host = HostOverhead(per_step_s=0.003, per_request_s=20e-6, overlapped=overlapped)
    cost = ScaledStepCost(HostedStepCost(GrowingSteps(), host), 1.1)
    contexts = range(5000, 5000 + 40 * num_decodes, num_decodes)
    steps = [cost.seconds(StepBatch(0, 0, 0, 0.0, num_decodes, context)) for context in contexts]
    assert cost.price_stretch(num_decodes, 5000, 40) == steps
    assert steps == sorted(steps)
