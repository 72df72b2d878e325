"""Small tokenizers of the kinds that models have, trained in a moment, and a way to tokenise a few rows with them."""

import json

from rows import options
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from data.tokenization import load_tokenized

H, A = "\n\nHuman:", "\n\nAssistant:"
CORPUS = [
    f"{H} Is the sky blue? yes yellow yes yellow{A} The sky is blue and the sun is yellow.",
    "user assistant system",
    "a good answer and a bad answer, the quick brown fox jumps over the lazy dog",
] * 20
EOS, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n\n{{ m['content'] | trim }}<|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n\n{% endif %}"
)
LLAMA2 = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + m['content'] | trim + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] | trim + ' ' + eos_token }}{% endif %}{% endfor %}"
)


def byte_level(bos=None, adds_bos=False, template=None, prefix_space=False):
    """A small GPT-2-like tokenizer."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    inner.decoder = decoders.ByteLevel()
    special = [EOS, START, END] + ([bos] if bos else [])
    inner.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=special,
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    if adds_bos:
        inner.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, inner.token_to_id(bos))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token=bos,
        eos_token=EOS,
        chat_template=template,
        additional_special_tokens=[START, END],
    )


def metaspace(scheme="first", kind="bpe", template=None):
    """A small Llama-like tokenizer: word marks, a BOS of its own, byte fallback."""
    special = ["<unk>", "<s>", "</s>"]
    if kind == "bpe":
        inner = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=True)
        inner.train_from_iterator(
            CORPUS, trainers.BpeTrainer(vocab_size=300, show_progress=False, special_tokens=special)
        )
        state = json.loads(inner.to_str())  # the trainer knows no byte tokens, so they are added by hand
        state["pre_tokenizer"]["split"] = False  # words were split to learn from, and are not split to encode
        vocabulary = state["model"]["vocab"]
        vocabulary.update({f"<0x{byte:02X}>": len(vocabulary) + byte for byte in range(256)})
        inner = Tokenizer.from_str(json.dumps(state))
    else:  # a Unigram model can spell its own control tokens
        pieces = special + list("\u2581abcdefghijklmnopqrstuvwxyz?.<>/\n:ISHATQ") + ["\u2581the", "\u2581answer"]
        inner = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], unk_id=0))
        inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    inner.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=template
    )


TOKENIZERS = {
    "byte-level": byte_level,
    "with BOS": lambda: byte_level("<|bos|>", True),
    "BOS never added": lambda: byte_level("<|bos|>"),
    "prefix space": lambda: byte_level(prefix_space=True),
    "metaspace": metaspace,
    "metaspace always": lambda: metaspace("always"),
    "unigram": lambda: metaspace(kind="unigram"),
    "slow": ByT5Tokenizer,
}


def config(tmp_path, max_length=512, max_prompt_length=256, **data):
    folder = {"cache_dir": str(tmp_path / "cache"), "test_fraction": 0.0}
    return options(max_length, max_prompt_length, **(folder | data))


def dump(tmp_path, rows, name="data.jsonl") -> str:
    (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(tmp_path / name)


def load(tmp_path, rows, tokenizer, sft=False, **options):
    return load_tokenized(
        dump(tmp_path, rows), "train", tokenizer, config(tmp_path, **options), "responses" if sft else "pairs"
    )


def pair(prompt="Is the sky blue?", chosen="yellow", rejected="yes"):
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def trees(dataset, group=0):
    return [dataset.prompt(group).tolist()] + [
        dataset.response(group, i).tolist() for i in range(dataset.n_group_responses(group))
    ]


def plain(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False)
