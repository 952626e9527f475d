"""Images of prompts: read by the processor, stored image by image, encoded once, and checked.

`processor` makes token ids and tensors of a prompt with pictures, `prompt_images` holds them and
gives a forward its tensors and positions, `encoder_cache` keeps features, and `check` compares a
model with its plain forward. The forward itself is `model.runner`'s.
"""
