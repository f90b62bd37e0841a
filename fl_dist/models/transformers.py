"""Language models of the package transformers, whole or with adapters."""

from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from safetensors import SafetensorError
from torch import Tensor, nn

from fl_dist.common.errors import FlDistError, ModelError, error_message
from fl_dist.models.adapters import Lora, add_adapters, file_names, write_adapter
from fl_dist.models.base import PretrainedModule, models
from fl_dist.models.transformers_files import Dtype, Source, build_config, load_network, quiet_library, read_source

NETWORK = "network."
"""Begins the names of the network's parameters."""


class ExportError(FlDistError):
    """The final model could not be written for transformers."""


class Transformer(PretrainedModule):
    """A network of transformers, or one of peft around it, that returns logits."""

    def __init__(self, network: Any, source: Source, padding: int | None, has_adapters: bool) -> None:
        super().__init__()
        self.network = network
        self._positions = getattr(network.config, "max_position_embeddings", None)
        self._padding, self._has_adapters = padding, has_adapters
        own = file_names(network) if has_adapters else {name: name for name in network.state_dict()}
        self.file_names = {name: NETWORK + inner for name, inner in own.items()}
        frozen = [name for name, p in self.named_parameters() if not p.requires_grad]
        self.external = frozenset(frozen if has_adapters and source.folder is not None else ())
        self.origin = source.origin

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        if self._positions is not None and input_ids.shape[1] > self._positions:
            raise ModelError(
                f"rows have {input_ids.shape[1]} tokens, the model {self._positions} positions; lower data.length"
            )
        if self._padding is not None and attention_mask is not None:
            # Decoders find a row's last token by the id of the padding, not by the mask.
            input_ids = input_ids.masked_fill(attention_mask == 0, self._padding)
        logits: Tensor = self.network(input_ids=input_ids, attention_mask=attention_mask).logits
        return logits.float() if logits.dtype.itemsize < 4 else logits

    def export(self, folder: Path, tensors: dict[str, Tensor]) -> None:
        """Write `tensors`, by their names here, as an adapter of peft or as a model of transformers."""
        named = {name: tensors[inner] for name, inner in self.file_names.items() if inner in tensors}
        if self._has_adapters:
            write_adapter(self.network, named, folder / "adapter")
            return
        try:
            with quiet_library():
                self.network.save_pretrained(folder / "model", state_dict=named)
            for file in (folder / "model").iterdir():
                file.chmod(0o644)
        except (OSError, SafetensorError) as error:
            raise ExportError(
                f"{folder / 'model'} cannot be written: {error_message(error)}; repair that, and start the run again"
            ) from None


@models.register
def transformers(
    outputs: int,
    vocabulary: int,
    per_token: bool,
    *,
    path: Annotated[
        str | dict[str, Any],
        Field(
            description="folder with config.json and .safetensors files; or a configuration (a file, or its settings)"
        ),
    ],
    lora: Annotated[Lora | None, Field(description="train adapters only; null: all weights")] = None,
    dtype: Annotated[Dtype, Field(description="of the weights under adapters; auto: as in their file")] = "float32",
    gradient_checkpointing: Annotated[
        bool, Field(description="compute activations again in the backward pass, to need less memory")
    ] = False,
) -> nn.Module:
    """A language model of transformers: of the next token, or of a label of each text. Nothing is downloaded."""
    if not vocabulary:
        raise ModelError("model transformers needs rows of token ids, such as those of data=text")
    if dtype != "float32" and lora is None:
        raise ModelError(
            f"model.dtype is {dtype}, which is for weights under adapters; set model.lora, or dtype to float32"
        )
    source = read_source(path)
    with quiet_library() as library:
        network = _build_network(library, source, outputs, vocabulary, per_token, dtype)
        network.config.use_cache = False
        if gradient_checkpointing:
            network.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if lora is not None:
            network = add_adapters(network, lora, "CAUSAL_LM" if per_token else "SEQ_CLS")
        return Transformer(network, source, None if per_token else network.config.pad_token_id, lora is not None)


def _build_network(library: Any, source: Source, outputs: int, vocabulary: int, per_token: bool, dtype: Dtype) -> Any:
    ids = max(vocabulary, outputs if per_token else 0)
    config = build_config(library, source, ids)
    _check_kind(library, config, source, per_token)
    size = config.get_text_config().vocab_size
    if ids > size:
        raise ModelError(
            f"{source.location} has an embedding of {size} ids, but the data has ids up to {ids - 1}; "
            "use the model's own tokenizer"
        )
    if not per_token:
        config.num_labels = outputs
        if config.pad_token_id is None:
            config.pad_token_id = config.eos_token_id if isinstance(config.eos_token_id, int) else 0
    auto = library.AutoModelForCausalLM if per_token else library.AutoModelForSequenceClassification
    if source.folder is not None:
        return load_network(auto, config, source.folder, dtype, has_new_head=not per_token)
    try:
        return auto.from_config(config, dtype=torch.bfloat16 if dtype == "bfloat16" else torch.float32)
    except Exception as error:
        raise ModelError(f"{source.location} cannot be built: {error_message(error)}") from error


def _check_kind(library: Any, config: Any, source: Source, per_token: bool) -> None:
    """Whether there is a model of this kind for the task."""
    if not per_token:
        if type(config) not in library.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
            raise ModelError(f"{source.location} is of the type {config.model_type}, which has no classifier of texts")
        return
    is_masked = type(config) in library.MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False)
    if type(config) not in library.MODEL_FOR_CAUSAL_LM_MAPPING or is_masked:
        raise ModelError(
            f"{source.location} is of the type {config.model_type}, which does not predict the next token; "
            "choose a causal model, such as gpt2 or llama"
        )
