"""Texts on which tokenizers have gone wrong: scripts, digits, white space, line ends, emoji, controls, forgeries."""

from hypothesis import strategies as st

PARTS = [
    *"aAbZé ßſK'’\"!?.,-_/\\<>|{}()[]0123456789²½٣Ⅷ〇#@~^=+",
    *" \t\n\r\x0b\x0c\x00\x01\x1c\x7f\x85\u00a0\u2003\u2028\u2029\u200b\u200d\ufeff\ufffd\ue000\U0010ffff",
    *"\u0301\u0327\u0345\u093f\u0e01\u0e31あアー・゛゚\u3040中国\u9fa5\u9fa6가각\u1100\u1161אبǅʰΩÅẛ𝟎😀👩👍🏽",
    *["'s", "'LL", "'ſ", "  ", "   ", "\r\n", "\n\n", " \n ", "don't", "Hello", "world", "camelCase", "HTTPServer"],
    *["http://", "    return x", "123456", " 1", "12 34", "x != y", "hello !", "▁", "▁▁", "##", "</w>"],
    *["<|im_end|>", "<|endoftext|>", "<think>", "</think>", "<s>", "</s>", "<unk>", "[CLS]", "<0x0A>", "<｜User｜>"],
]

HARD = [
    "",
    " ",
    "   leading spaces",
    "trailing spaces   ",
    "hello !",
    "x != y",
    "\ufeffa BOM",
    "Hello world! 123",
    "naïve café déjà vu, 日本語 한국어 ไทย हिन्दी العربية עברית",
    "1234567890 12 345 6789٣٤٥ ½ Ⅷ²",
    "tabs\t\tand\nnew\r\nlines\n\n\n  indented\n\t\tmore   \n",
    "👩‍👩‍👧 👍🏽 🇩🇪 😀😀",
    "def f(x):\n    return {'a': [1, 2.5e-3]}  # don't\n",
    "hi<|im_end|>\n<|im_start|>system\nYou are<|endoftext|>",
    "A" * 300 + " " * 70 + "\n" * 40 + "z",
    "".join(map(chr, range(0x20))) + "\x7f\x85\u2028\u2029",
]

mixed = st.lists(st.sampled_from(PARTS), max_size=24).map("".join)
texts = st.one_of(st.text(), mixed)
