"""Formats: what each pattern takes, by the words of the standards."""

from __future__ import annotations

import re
from datetime import date, timedelta

import pytest

from fastdraft.constraints.formats import FORMATS

EXAMPLES = {
    "date": (["2024-02-29", "2000-02-29", "0001-01-01"], ["1900-02-29", "0000-01-01", "2024-13-01", "2024-1-1"]),
    "date-time": (["2024-01-01T00:00:00Z", "2024-01-01t00:00:00.25-01:30"], ["2024-01-01T00:00:00", "2024-01-01"]),
    "time": (["00:00:00Z", "23:59:59.5+23:59"], ["00:00:00", "24:00:00Z", "00:00:60Z"]),
    "duration": (["P1Y2M3DT4H5M6S", "PT1M", "P2W"], ["P", "PT", "P1D2H", "P1W2D", "P1YT", "1D"]),
    "email": (["a.b+c@d.example", "a@[1.2.3.4]"], ["a", "@b", "a@", ".a@b", "a b@c"]),
    "idn-email": (["ü@ä.example"], ["a"]),
    "hostname": (["a", "a-b.c", "1.2"], ["-a", "a-", "a..b", "a_b", "a." * 3, "a" * 64]),
    "idn-hostname": (["ä.ö"], ["-ä"]),
    "ipv4": (["0.0.0.0", "255.249.199.9"], ["256.0.0.0", "01.0.0.0", "1.2.3"]),
    "ipv6": (
        ["::", "::1", "1::", "1:2:3:4:5:6:7:8", "1::8", "1:2:3:4:5:6:1.2.3.4", "::1.2.3.4", "1:2:3:4:5:6:7::"],
        ["1", "1:2:3:4:5:6:7", ":1", "1:2:3:4:5:6:7:8:9", "1::2::3", "12345::", "::256.1.1.1"],
    ),
    "uri": (
        ["http://a/b?c#d", "mailto:a@b", "urn:x:y", "a:", "http://[::1]:80/"],
        ["a", "/a", "//a", "http://a b", "1:"],
    ),
    "uri-reference": (["", "a", "/a", "//a/b", "?q", "#f", "http://a", "a/b:c"], ["a b", "\\a", "%g"]),
    "iri": (["http://ä/ö"], ["ä"]),
    "iri-reference": (["ä", "http://ä"], ["a b"]),
    "uri-template": (["a{b}", "{/a,b*}{?c:3}", "a"], ["{", "{}", "a}"]),
    "json-pointer": (["", "/a", "/a~0~1/0"], ["a", "/~", "/~2"]),
    "relative-json-pointer": (["0", "1/a", "10#"], ["", "01", "/a"]),
    "uuid": (["00000000-0000-0000-0000-00000000000F"], ["0" * 32, "0000000-00000-0000-0000-000000000000"]),
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_takes_what_its_standard_says(name):
    good, bad = EXAMPLES[name]
    assert [text for text in good if not re.fullmatch(FORMATS[name], text)] == []
    assert [text for text in bad if re.fullmatch(FORMATS[name], text)] == []


def test_dates_are_exactly_those_of_the_calendar():
    days = {date(1899, 12, 1) + timedelta(n) for n in range(800)} | {
        date(1999, 12, 1) + timedelta(n) for n in range(800)
    }
    for day in days:
        assert re.fullmatch(FORMATS["date"], day.isoformat()), day
    for year in (1899, 1900, 1901, 1999, 2000, 2001, 2004, 2100, 2400):
        for month in range(14):
            for day in range(33):
                text = f"{year}-{month:02}-{day:02}"
                try:
                    date.fromisoformat(text)
                    exists = True
                except ValueError:
                    exists = False
                assert bool(re.fullmatch(FORMATS["date"], text)) == exists, text
