import pytest

from tenuto.core.errors import ConfigError
from tenuto.sim.hardware.gpus import GPUS, get_gpu

NAMES = ["RTX5090", "RTXPRO6000", "A100-40", "A100-80", "L40S", "H100", "H200", "B200"]


def test_the_gpus_are_the_promised_ones() -> None:
    assert list(GPUS) == NAMES


def test_a_name_is_found_in_any_case() -> None:
    assert get_gpu("h200") is GPUS["H200"]


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(
        ConfigError, match=r"'H300'.*RTX5090, RTXPRO6000, A100-40, A100-80, L40S, H100, H200, B200"
    ):
        get_gpu("H300")


@pytest.mark.parametrize("name", NAMES)
def test_efficiencies_are_shares(name: str) -> None:
    gpu = GPUS[name]
    for share in (
        gpu.gemm_efficiency,
        gpu.attention_efficiency,
        gpu.weight_read_efficiency,
        gpu.kv_read_efficiency,
    ):
        assert 0.4 < share < 1


@pytest.mark.parametrize(("untabled", "same_die"), [("RTX5090", "RTXPRO6000"), ("A100-40", "A100-80")])
def test_a_card_without_tables_borrows_the_efficiencies_of_its_sibling(untabled: str, same_die: str) -> None:
    borrower, lender = GPUS[untabled], GPUS[same_die]
    assert borrower.table_system is None
    assert lender.table_system is not None
    assert borrower.gemm_efficiency == lender.gemm_efficiency
    assert borrower.kv_read_efficiency == lender.kv_read_efficiency
