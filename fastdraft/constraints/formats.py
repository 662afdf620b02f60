"""The string formats of JSON Schema, each as a regular expression: one meaning for grammar and validation."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

__all__ = ["CLOCK", "DATE", "FORMATS", "ZONE"]

# Exact to the day, as Python's own dates are: no year 0000, no 29 February but in leap years, no leap second.
_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9][0-9]|[0-9][1-9][0-9]{2}|[1-9][0-9]{3})"
_LEAP = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DAY = "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8])"
DATE = f"(?:{_YEAR}-(?:{_DAY})|{_LEAP}-02-29)"
CLOCK = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?"
ZONE = "(?:[Zz]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"

_HOURS = "[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S"
_DAYS = "[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D"

_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"(?:{_BYTE}\.){{3}}{_BYTE}"
_GROUP = "[0-9A-Fa-f]{1,4}"
_LAST = f"(?:{_GROUP}:{_GROUP}|{_IPV4})"
_IPV6 = (
    f"(?:(?:{_GROUP}:){{6}}{_LAST}|::(?:{_GROUP}:){{5}}{_LAST}|(?:{_GROUP})?::(?:{_GROUP}:){{4}}{_LAST}"
    + "".join(f"|(?:(?:{_GROUP}:){{0,{n}}}{_GROUP})?::(?:{_GROUP}:){{{4 - n}}}{_LAST}" for n in (1, 2, 3))
    + f"|(?:(?:{_GROUP}:){{0,4}}{_GROUP})?::{_LAST}|(?:(?:{_GROUP}:){{0,5}}{_GROUP})?::{_GROUP}"
    + f"|(?:(?:{_GROUP}:){{0,6}}{_GROUP})?::)"
)

_WIDE = "\u00a0-\ud7ff\uf900-\ufdcf\ufdf0-\uffef"  # letters beyond ASCII, for the formats that have them


def _host(letters: str) -> str:
    label = f"[{letters}](?:[{letters}-]{{0,61}}[{letters}])?"
    return rf"{label}(?:\.{label})*"


def _mailbox(letters: str) -> str:
    atom = f"[{letters}!#$%&'*+/=?^_`{{|}}~-]+"
    return rf"{atom}(?:\.{atom})*@(?:{_host(letters)}|\[{_IPV4}\])"


def _reference(letters: str, *, absolute: bool) -> str:
    """RFC 3986 (and 3987 with more letters): a URI, or also what is relative to one."""
    escaped = "%[0-9A-Fa-f]{2}"
    name = f"(?:[{letters}._~!$&'()*+,;=-]|{escaped})"
    first = f"(?:[{letters}._~!$&'()*+,;=@-]|{escaped})"  # no colon, which would make a scheme of it
    char = f"(?:[{letters}._~!$&'()*+,;=:@-]|{escaped})"
    user = f"(?:[{letters}._~!$&'()*+,;=:-]|{escaped})*@"
    future = r"v[0-9A-Fa-f]+\.[0-9A-Za-z._~!$&'()*+,;=:-]+"
    network = rf"//(?:{user})?(?:\[(?:{_IPV6}|{future})\]|{name}*)(?::[0-9]*)?(?:/{char}*)*"
    rooted = f"/(?:{char}+(?:/{char}*)*)?"
    tail = rf"(?:\?(?:{char}|[/?])*)?(?:#(?:{char}|[/?])*)?"
    full = f"[A-Za-z][0-9A-Za-z+.-]*:(?:{network}|{rooted}|{char}+(?:/{char}*)*)?{tail}"
    return full if absolute else f"(?:{full}|(?:{network}|{rooted}|{first}+(?:/{char}*)*)?{tail})"


_ASCII = "0-9A-Za-z"
_POINTER = "(?:/(?:[^/~]|~[01])*)*"
_VARIABLE = "(?:[0-9A-Za-z_]|%[0-9A-Fa-f]{2})+(?:\\.(?:[0-9A-Za-z_]|%[0-9A-Fa-f]{2})+)*(?::[1-9][0-9]{0,3}|\\*)?"

# Without anchors; the whole string has to match.
FORMATS: Mapping[str, str] = MappingProxyType(
    {
        "date": DATE,
        "date-time": f"{DATE}[Tt]{CLOCK}{ZONE}",
        "duration": f"P(?:[0-9]+W|(?:{_DAYS})(?:T(?:{_HOURS}))?|T(?:{_HOURS}))",
        "email": _mailbox(_ASCII),
        "hostname": _host(_ASCII),
        "idn-email": _mailbox(_ASCII + _WIDE),
        "idn-hostname": _host(_ASCII + _WIDE),
        "ipv4": _IPV4,
        "ipv6": _IPV6,
        "iri": _reference(_ASCII + _WIDE, absolute=True),
        "iri-reference": _reference(_ASCII + _WIDE, absolute=False),
        "json-pointer": _POINTER,
        "relative-json-pointer": f"(?:0|[1-9][0-9]*)(?:#|{_POINTER})",
        "time": f"{CLOCK}{ZONE}",
        "uri": _reference(_ASCII, absolute=True),
        "uri-reference": _reference(_ASCII, absolute=False),
        "uri-template": (
            "(?:[!#$&()*+,./0-9:;=?@A-Z\\[\\]_a-z~" + _WIDE + "-]|%[0-9A-Fa-f]{2}"
            rf"|\{{[+#./;?&=,!@|]?{_VARIABLE}(?:,{_VARIABLE})*\}})*"
        ),
        "uuid": "[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
    }
)
