"""Megatron-Core as trainer and scorer."""

import warnings

# At import Megatron warns of every CUDA extension that it finds none of, a page in all; none of them is used here.
warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core\.")
# It calls the collectives of sequence parallelism by names that torch is about to change.
warnings.filterwarnings("ignore", category=FutureWarning, message=r"`torch\.distributed\.reduce_scatter_tensor`")
