"""Where prompts come from.

`rows` reads, words and splits questions without a tokenizer (and without torch, so that a wrong data file is
reported at once); `load` turns them into prompts; `stream` puts them in the order of training.
"""
