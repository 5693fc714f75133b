"""The flights of the demo: which are read, in which order, and which worker gets which."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

from dualwrite.demo.flights import Flight, read_flights, share_of


def test_first_flight_of_the_year() -> None:
    first = next(read_flights(1))
    assert first == Flight(1, "UA1545", "N14228", "EWR", "IAH", "2013-01-01 05:15", "05:17", 2)
    assert not first.cancelled


def test_departures_are_counted_and_cancelled_flights_included() -> None:
    found = list(read_flights(1000))
    assert sum(not each.cancelled for each in found) == 1000
    assert sum(each.cancelled for each in found) == 4
    assert [each.number for each in found] == list(range(1, 1005))
    assert all(each.delay is None for each in found if each.cancelled)


def test_continuing_after_a_flight_skips_earlier_ones() -> None:
    assert list(read_flights(1000, after=900)) == list(read_flights(1000))[900:]
    assert list(read_flights(10, after=10)) == []


def test_reading_does_not_import_pandas() -> None:
    code = "import sys; from dualwrite.demo.flights import read_flights; next(read_flights(1)); print('pandas' in sys.modules)"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_shares_have_similar_sizes() -> None:
    shares = Counter(share_of(flight.aircraft, 4) for flight in read_flights(5000))
    assert set(shares) == {0, 1, 2, 3}
    assert min(shares.values()) > 900
