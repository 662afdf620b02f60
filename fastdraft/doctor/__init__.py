"""What a target and a draft give together, told before they are deployed."""

from fastdraft.doctor.examination import examine
from fastdraft.doctor.report import Acceptance, DayCost, Estimate, Guess, Live, Position, Report
from fastdraft.doctor.verdict import Verdict

__all__ = ["Acceptance", "DayCost", "Estimate", "Guess", "Live", "Position", "Report", "Verdict", "examine"]
