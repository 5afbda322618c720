"""GPU memory of a model's rank and of an engine's rank, from the model's sizes alone, in bytes."""

from engine3d.memory.copies import CopiedBytes, copied_by_rank
from engine3d.memory.resident import ResidentBytes, resident_by_rank
from engine3d.memory.serving import ServingBytes, serving_by_rank
from engine3d.memory.working import WorkingBytes, inference_peak, update_peak

__all__ = [
    "CopiedBytes",
    "ResidentBytes",
    "ServingBytes",
    "WorkingBytes",
    "copied_by_rank",
    "inference_peak",
    "resident_by_rank",
    "serving_by_rank",
    "update_peak",
]
