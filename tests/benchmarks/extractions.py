"""Twenty letters, notices and notes, and the types that a program reads from them; and six others to tune on.

Written for this benchmark. What is fitted is fitted on ``FIT``, never on what is measured.
"""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

__all__ = ["EXTRACTIONS", "FIT", "TYPES", "ask"]


class Line(BaseModel):
    article: str
    quantity: int
    unit_price: float


class Invoice(BaseModel):
    invoice_number: str
    customer: str
    city: str
    lines: list[Line]
    total: float
    currency: Literal["EUR", "USD", "GBP"]


class Contact(BaseModel):
    full_name: str
    company: str
    position: str
    email: str
    phone: str | None


class Event(BaseModel):
    title: str
    date: datetime.date
    location: str
    speakers: list[str]
    is_free: bool


class Ticket(BaseModel):
    reported_by: str
    product: str
    version: str
    severity: Literal["low", "medium", "high", "critical"]
    summary: str
    steps: list[str]


class Listing(BaseModel):
    street: str
    district: str
    rooms: int
    area_square_metres: float
    monthly_rent: float
    pets_allowed: bool
    available_from: datetime.date


TYPES: dict[str, Any] = {kind.__name__: kind for kind in (Invoice, Contact, Event, Ticket, Listing)}


def _read(name: str) -> tuple[tuple[str, str], ...]:
    lines = Path(__file__).with_name(name).read_text("utf-8").splitlines()
    return tuple((line["type"], line["text"]) for line in map(json.loads, lines))


EXTRACTIONS = _read("extractions.jsonl")
FIT = _read("extractions_fit.jsonl")


def ask(kind: str, text: str) -> str:
    """The question that is sent."""
    fields = ", ".join(TYPES[kind].model_fields)
    return f"Extract the {kind.lower()} from the text below as JSON with the keys {fields}.\n\n{text}"
