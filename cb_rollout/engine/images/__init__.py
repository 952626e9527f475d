"""Images of prompts: `processor` makes token ids and tensors of a prompt with pictures.

`prompt_images` holds them and gives a forward its tensors and positions. `check` compares a model
with its plain forward. The forward itself is `model.runner`'s.
"""
