"""The built-in stages, which change the messages of a run (`fedmuon.stages`)."""

from fedmuon.optim.client_privacy import ClientPrivacy
from fedmuon.optim.compression import Compression, Compressor, compressor
from fedmuon.optim.low_rank import Codec, EncodedStates, low_rank
from fedmuon.optim.personal_parameters import PersonalParameters
from fedmuon.optim.stage import Broadcast, Reply, ServerState, Stage

__all__ = [
    "Broadcast",
    "ClientPrivacy",
    "Codec",
    "Compression",
    "Compressor",
    "EncodedStates",
    "PersonalParameters",
    "Reply",
    "ServerState",
    "Stage",
    "compressor",
    "low_rank",
]
