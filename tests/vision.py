"""Tiny vision-language checkpoints with a tokenizer and an image processor, and a request with an image."""

from __future__ import annotations

import base64
import io
import random
from pathlib import Path
from typing import Any, NamedTuple

from tests.checkpoints import VOCAB
from tests.families import SIZES, in_a_process_of_its_own, random_values

_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"]
_SPECIAL += ["<|vision_pad|>", "<|image_pad|>", "<|video_pad|>", "<unk>"]
_WORDS = _SPECIAL + [f"w{i}" for i in range(VOCAB - len(_SPECIAL))]
_ROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
_VISION = {"hidden_size": 32, "intermediate_size": 32, "num_heads": 4, "out_hidden_size": 128}


class VisionFamily(NamedTuple):
    """A vision-language family, by the prefix of transformers' class names."""

    name: str
    prefix: str
    patch_size: int
    text: dict[str, Any]
    vision: dict[str, Any]

    def write(self, folder: Path) -> None:
        in_a_process_of_its_own(_write, self, folder)


QWEN2_5_VL = VisionFamily(  # mrope positions, input_embeds
    "qwen2.5-vl",
    "Qwen2_5_VL",
    14,
    {"rope_parameters": _ROPE},
    {"depth": 2, "window_size": 56, "fullatt_block_indexes": [1]},
)
QWEN3_VL = VisionFamily(  # deepstack as well
    "qwen3-vl",
    "Qwen3VL",
    16,
    {"rope_parameters": {**_ROPE, "mrope_interleaved": True}, "head_dim": 16},
    {"depth": 3, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]},
)


def _write(family: VisionFamily, folder: Path) -> None:
    import tokenizers
    import torch
    import transformers

    def name(part: str) -> Any:
        return getattr(transformers, family.prefix + part)

    words = tokenizers.models.WordLevel({word: i for i, word in enumerate(_WORDS)}, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        unk_token="<unk>",
        additional_special_tokens=_SPECIAL[1:8],
    )
    fast.image_token, fast.video_token = "<|image_pad|>", "<|video_pad|>"
    images = transformers.Qwen2VLImageProcessor(
        patch_size=family.patch_size, merge_size=2, min_pixels=56 * 56, max_pixels=112 * 112
    )
    videos = {"Qwen2_5_VL": "Qwen2VL", "Qwen3VL": "Qwen3VL"}[family.prefix] + "VideoProcessor"
    video = getattr(transformers, videos)(patch_size=family.patch_size)
    name("Processor")(image_processor=images, tokenizer=fast, video_processor=video).save_pretrained(folder)
    images.save_pretrained(folder)
    fast.save_pretrained(folder)

    config = name("Config")(
        text_config={**SIZES, **family.text},
        vision_config={**_VISION, "patch_size": family.patch_size, "spatial_merge_size": 2, **family.vision},
        image_token_id=_WORDS.index("<|image_pad|>"),
        video_token_id=_WORDS.index("<|video_pad|>"),
        vision_start_token_id=_WORDS.index("<|vision_start|>"),
        vision_end_token_id=_WORDS.index("<|vision_end|>"),
        tie_word_embeddings=False,
    )
    torch.manual_seed(1)
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    random_values(model)
    model.save_pretrained(folder)


def look_at_images(engine: Any) -> list[list[Any]]:
    """In the host: a prompt with an image between words, the same without, and another; with logprobs."""
    words = " ".join(f"w{i}" for i in range(5, 40))
    questions = [
        ("w1 <|vision_start|><|image_pad|><|vision_end|> " + words, _image(1)),
        ("w1 " + words, None),
        ("w2 <|vision_start|><|image_pad|><|vision_end|> w9", _image(2)),
    ]
    answers = [
        engine.generate(
            prompt,
            {"temperature": 0, "max_new_tokens": 5},
            image_data=image,
            return_logprob=True,
            logprob_start_len=0,
        )
        for prompt, image in questions
    ]
    names = ("prompt_tokens", "output_token_logprobs")
    return [[answer["output_ids"], *(answer["meta_info"][name] for name in names)] for answer in answers]


def _image(seed: int) -> str:
    from PIL import Image

    rng = random.Random(seed)
    image = Image.frombytes("RGB", (84, 112), rng.randbytes(84 * 112 * 3))
    file = io.BytesIO()
    image.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()
