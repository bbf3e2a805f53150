"""Plain modules that read like the paper, built from configs."""

from tokenformer.models.cost import Cost as Cost
from tokenformer.models.cost import cost as cost
from tokenformer.models.init import init_weights as init_weights
from tokenformer.models.language import Cache as Cache
from tokenformer.models.language import LanguageModel as LanguageModel
from tokenformer.models.language import Output as Output
from tokenformer.models.layers import Pattention as Pattention
