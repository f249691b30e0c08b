"""Small stock models of Transformers, randomly initialised: what people train, in miniature and in awkward sizes.

Each is trained through `model(**batch).loss`. Dropout stays as each architecture has it by default, so that a loop is
only right if its random numbers are right too. There is one file for each family.
"""

from tests.zoo.audio import AUDIO
from tests.zoo.base import VOCABULARY, Architecture, Batch, loss_of
from tests.zoo.decoder import DECODERS
from tests.zoo.encoder import ENCODERS
from tests.zoo.encoder_decoder import ENCODER_DECODERS
from tests.zoo.moe import MOE
from tests.zoo.multimodal import MULTIMODAL
from tests.zoo.state_space import STATE_SPACE
from tests.zoo.vision import VISION

FAMILIES = (DECODERS, ENCODERS, ENCODER_DECODERS, VISION, AUDIO, MOE, STATE_SPACE, MULTIMODAL)
ALL = [architecture for family in FAMILIES for architecture in family]
EVERYWHERE = [architecture for family in FAMILIES for architecture in family[:10]]
"""Up to ten of each family, on every placement; the others on a mixed one."""
ZOO = {architecture.name: architecture for architecture in ALL}

__all__ = ["ALL", "EVERYWHERE", "VOCABULARY", "ZOO", "Architecture", "Batch", "loss_of"]
