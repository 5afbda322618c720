"""GPU memory of a model's rank and of an engine's rank, from the model's sizes alone, in bytes."""

from engine3d.memory.resident import ResidentBytes, merged_bytes, quantised_bytes, resident_by_rank
from engine3d.memory.serving import ServingBytes, serving_by_rank
from engine3d.memory.working import WorkingBytes, inference_peak, peer_memory, update_peak

__all__ = [
    "ResidentBytes",
    "ServingBytes",
    "WorkingBytes",
    "inference_peak",
    "merged_bytes",
    "peer_memory",
    "quantised_bytes",
    "resident_by_rank",
    "serving_by_rank",
    "update_peak",
]
