"""What a rank of a model and a rank of an engine hold on a GPU, from the model's sizes alone, in bytes."""

from engine3d.memory.held import Held, held_by_rank
from engine3d.memory.serving import Serving, serving_by_rank
from engine3d.memory.working import Working, inference_peak, peer_memory, update_peak

__all__ = [
    "Held",
    "Serving",
    "Working",
    "held_by_rank",
    "inference_peak",
    "peer_memory",
    "serving_by_rank",
    "update_peak",
]
