"""How many prompt tokens ride along with requests that decode."""

from __future__ import annotations

import pytest

from fastdraft.control.portion import Portion


def test_where_nothing_decodes_a_round_is_full() -> None:
    one = Portion(512)
    assert one.size(decoding=False) == 512
    one.observe(512, 1.0, decoding=False)
    assert one.size(decoding=False) == 512


@pytest.mark.parametrize(("token", "want"), [(0.0001, 512), (0.001, 75), (0.01, 16)])
def test_decoding_requests_wait_no_longer_than_they_may(token: float, want: int) -> None:
    one = Portion(512)
    for _ in range(30):
        one.observe(0, 0.05, decoding=True)
        fed = one.size(decoding=True)
        one.observe(fed, 0.05 + token * fed, decoding=True)
    assert one.size(decoding=True) == pytest.approx(want, rel=0.05)


def test_rounds_without_decoding_say_what_a_token_takes() -> None:
    one = Portion(512)
    assert one.size(decoding=True) == 64
    one.observe(500, 0.5, decoding=False)
    one.observe(0, 0.04, decoding=True)
    assert one.size(decoding=True) == 60


def test_what_costs_nothing_is_not_counted() -> None:
    one = Portion(512)
    one.observe(0, 0.05, decoding=True)
    one.observe(16, 0.04, decoding=True)
    assert one.size(decoding=True) == 64
