"""Folders of text models whose figures are computed again from the characters, without lipaudit.

Truths come from plain transformers: a folder's own tokenizer and model on one text at a time,
dense float64 autograd in the embeddings, loops over the tokens of a continuation.
"""

import inspect
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor
from torch.overrides import TorchFunctionMode

import lipaudit
from lipaudit.data.loading import DataOptions, load_data
from lipaudit.models.sources.loader import LoadOptions, load_net

TEXTS = [
    "A Good film,  with GREAT actors!",
    "The  bad film (and a very poor plot).",
    "Über-cool café — it's naïve #### but good",
    " good\tbad\nfilm ",
    "zebra 日本 film; the end...",
    "don't go: great, great? the actors are poor",
    "a very very long film " * 7,
    "bad [SEP] film [CLS] good",  # as words of a text
]
QUERIES = 12
"""Candidates that an attack tries for each change."""
MOST = 32
"""Tokens that every model takes: the last text is cut."""
BERT = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
ROBERTA = ("<s>", "<pad>", "</s>", "<unk>")
LLAMA = ("<unk>", "<s>", "</s>")
T5_TOKENS = ("<pad>", "</s>", "<unk>")
LLAMA_NAMES = {"unk_token": "<unk>", "eos_token": "</s>"}
T5_NAMES = LLAMA_NAMES | {"pad_token": "<pad>"}
AROUND = "[CLS]:0 $A:0 [SEP]:0"
CLASSES = 3

H = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
LONG = {"max_position_embeddings": MOST}
GPT2 = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": MOST}
BART = {
    "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
} | LONG  # fmt: skip
ENDS = {"bos_token_id": "<s>", "eos_token_id": "</s>"}
NO_IDS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}


@dataclass(frozen=True)
class Folder:
    """A model and its tokenizer.

    Attributes:
        name: what is odd about it, too.
        tokens: the kind of tokenizer (see `train_tokenizer`).
        model: a class of transformers.
        settings: of its configuration; ids are given by their tokens.
        special: tokens that come first in the vocabulary, so that their ids are known.
        template: what the tokenizer puts around a text; nothing where it is empty.
        names: which special tokens the tokenizer names, by what it calls them.
        types: whether it returns types of tokens.
    """

    name: str
    tokens: str
    model: str
    settings: dict[str, Any] = field(default_factory=dict)
    special: tuple[str, ...] = BERT
    template: str = AROUND
    names: dict[str, str] = field(
        default_factory=lambda: {
            "pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]",
        }
    )  # fmt: skip
    types: bool = False

    @property
    def classifier(self) -> bool:
        """Whether it has classes."""
        return self.model.endswith("ForSequenceClassification")

    @property
    def scored(self) -> bool:
        """Whether it scores continuations."""
        return self.model.endswith(("ForCausalLM", "LMHeadModel"))


FOLDERS = [
    *(Folder(f"bert, {name}", kind, "BertForSequenceClassification", H | LONG, types=True)
      for name, kind in (("uncased WordPiece", "uncased"), ("cased WordPiece", "cased"),
                         ("characters", "character"))),
    Folder("distilbert, bytes with ####", "bytes", "DistilBertForSequenceClassification",
           {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 24} | LONG),
    Folder("roberta, bytes, pad is id 1", "bytes", "RobertaForSequenceClassification",
           H | {"max_position_embeddings": MOST + 2, "pad_token_id": "<pad>", **ENDS},
           ROBERTA, "<s>:0 $A:0 </s>:0",
           {"pad_token": "<pad>", "unk_token": "<unk>", "cls_token": "<s>", "sep_token": "</s>"}),
    Folder("deberta-v2, Unigram", "unigram", "DebertaV2ForSequenceClassification",
           H | LONG | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    Folder("gpt2, bytes, no pad, a text ends in id 0", "bytes", "GPT2ForSequenceClassification",
           GPT2 | NO_IDS, (), "", {}),
    Folder("gpt2, bytes, pad is the end, end appended", "bytes", "GPT2ForSequenceClassification",
           GPT2 | {"pad_token_id": "</s>", "eos_token_id": "</s>"}, ("</s>",), "$A:0 </s>:0",
           {"pad_token": "</s>", "eos_token": "</s>"}),
    Folder("llama, Unigram, no pad, end appended", "unigram", "LlamaForSequenceClassification",
           H | LONG | {"pad_token_id": None, **ENDS},
           LLAMA, "<s>:0 $A:0 </s>:0", LLAMA_NAMES),
    Folder("qwen2, bytes, config and tokenizer disagree", "bytes",
           "Qwen2ForSequenceClassification",
           H | LONG | {"pad_token_id": "<s>", "num_key_value_heads": 2},
           LLAMA, "<s>:0 $A:0 </s>:0", {"unk_token": "<unk>", "pad_token": "</s>"}),
    Folder("bart, bytes, reads the end", "bytes", "BartForSequenceClassification",
           BART | {"pad_token_id": "<pad>", **ENDS, "decoder_start_token_id": "</s>"},
           ROBERTA, "<s>:0 $A:0 </s>:0", T5_NAMES),
    Folder("t5 classifier, Unigram", "unigram", "T5ForSequenceClassification",
           T5 | {"pad_token_id": "<pad>", "eos_token_id": "</s>",
                 "decoder_start_token_id": "<pad>"}, T5_TOKENS, "$A:0 </s>:0", T5_NAMES),
    Folder("t5, Unigram, starts with id 0, pad is id 2", "unigram", "T5Model",
           T5 | {"pad_token_id": "<unk>", "eos_token_id": "</s>",
                 "decoder_start_token_id": "<pad>"}, T5_TOKENS, "$A:0 </s>:0", T5_NAMES),
    Folder("gpt2 language model, bytes, no pad", "bytes", "GPT2LMHeadModel",
           GPT2 | NO_IDS, (), "", {}),
    Folder("llama language model, Unigram, start", "unigram", "LlamaForCausalLM",
           H | LONG | {"pad_token_id": None, **ENDS},
           LLAMA, "<s>:0 $A:0", LLAMA_NAMES),
    Folder("gpt-neox language model, whole words", "word", "GPTNeoXForCausalLM",
           H | LONG | {"pad_token_id": None, "bos_token_id": None, "eos_token_id": "</s>"},
           LLAMA, "", {"unk_token": "<unk>", "pad_token": "</s>"}),
    Folder("bloom language model, characters, end appended", "character", "BloomForCausalLM",
           {"hidden_size": 16, "n_layer": 1, "n_head": 2, "pad_token_id": "</s>", **ENDS},
           LLAMA, "$A:0 </s>:0", LLAMA_NAMES),
]  # fmt: skip


def train_tokenizer(folder: Folder) -> transformers.PreTrainedTokenizerFast:
    """Train a tokenizer of a folder's kind on the texts, but for the one with a zebra."""
    kind = folder.tokens
    piece = (models.WordPiece, pre_tokenizers.BertPreTokenizer(), decoders.WordPiece(),
             trainers.WordPieceTrainer)  # fmt: skip
    model, pre, decoder, trainer = {
        "uncased": piece,
        "cased": piece,
        "bytes": (models.BPE, pre_tokenizers.ByteLevel(add_prefix_space=False),
                  decoders.ByteLevel(), trainers.BpeTrainer),
        "unigram": (models.Unigram, pre_tokenizers.Metaspace(), decoders.Metaspace(),
                    trainers.UnigramTrainer),
        "word": (models.WordLevel, pre_tokenizers.Whitespace(), None, trainers.WordLevelTrainer),
        "character": (models.BPE, pre_tokenizers.Split("", "isolated"), decoders.Fuse(),
                      trainers.BpeTrainer),
    }[kind]  # fmt: skip
    unknown = next((token for token in folder.special if "unk" in token.lower()), None)
    given = {"unk_token": unknown} if unknown else {}
    own = tokenizers.Tokenizer(model(**({} if kind == "unigram" else given)))
    own.pre_tokenizer, own.decoder = pre, decoder
    if kind == "uncased":
        own.normalizer = normalizers.BertNormalizer(lowercase=True)
    more = given if kind == "unigram" else {}
    if kind == "bytes":
        more["initial_alphabet"] = pre_tokenizers.ByteLevel.alphabet()
    size = {"bytes": 320, "word": 40}.get(kind, 110)
    learnt = [text for text in TEXTS if "zebra" not in text]
    special = list(folder.special)
    own.train_from_iterator(
        learnt * 3, trainer(vocab_size=size, special_tokens=special, show_progress=False, **more)
    )
    if folder.template:
        around = [(name, own.token_to_id(name)) for name in special]
        own.post_processor = processors.TemplateProcessing(
            single=folder.template, pair=f"{folder.template} $B:1", special_tokens=around
        )
    takes = ["input_ids", "attention_mask", *(["token_type_ids"] if folder.types else [])]
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=own, model_max_length=MOST, model_input_names=takes, **folder.names
    )


def save(folder: Folder, path: Path) -> "Plain":
    """Write a folder: its tokenizer, and a model with random weights; return what is read."""
    tokenizer = train_tokenizer(folder)
    settings = {
        name: tokenizer.convert_tokens_to_ids(value)
        if name.endswith("token_id") and value is not None
        else value
        for name, value in folder.settings.items()
    }
    kind = getattr(transformers, folder.model)
    more = {"num_labels": CLASSES} if folder.classifier else {}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = kind(kind.config_class(vocab_size=len(tokenizer), **more, **settings))
        for weight in module.parameters():  # every token, type and position must show
            if weight.ndim > 1:
                torch.nn.init.normal_(weight, std=0.7)
    for each in (tokenizer, module):
        each.save_pretrained(path)
    return Plain(folder, path)


class InDouble(TorchFunctionMode):
    """Take every step in float64: T5 and Llama take some in float32, whatever they hold."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function with float64 in place of float32."""
        func = Tensor.double if func is Tensor.float else func
        wide = [torch.float64 if a is torch.float32 else a for a in args]
        named = {k: torch.float64 if a is torch.float32 else a for k, a in (kwargs or {}).items()}
        return func(*wide, **named)


class Plain:
    """A folder, run by transformers alone on one text at a time."""

    def __init__(self, folder: Folder, path: Path) -> None:
        self.folder = folder
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        module = getattr(transformers, folder.model).from_pretrained(path)
        self.module = module.double().eval()

    def inputs(self, text: str) -> dict[str, Tensor]:
        """Return what the tokenizer makes of a text, as far as the model takes it."""
        given = self.tokenizer(text, truncation=True, max_length=MOST, return_tensors="pt")
        takes = inspect.signature(self.module.forward).parameters
        return {name: value for name, value in given.items() if name in takes}

    def output(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return the logits of classes or of the next token, or the mean of the last states."""
        if self.folder.model.endswith("Model") and self.module.config.is_encoder_decoder:
            ids = inputs["input_ids"]
            start = torch.tensor([[self.module.config.decoder_start_token_id]])
            inputs = inputs | {"decoder_input_ids": torch.cat([start, ids[:, :-1]], 1)}
        with InDouble():
            out = self.module(**inputs)
        if self.folder.classifier:
            return out.logits[0]
        return out.logits[0, -1] if self.folder.scored else out.last_hidden_state[0].mean(0)

    @torch.no_grad()
    def classify(self, text: str) -> int:
        """Return the class of a text."""
        return int(self.output(self.inputs(text)).argmax())

    def differentiate(self, text: str) -> tuple[Tensor, float]:
        """Return the output, and its Jacobian's norm in the embeddings that the model looks up."""
        inputs, held = self.inputs(text), list[Tensor]()
        size = self.module.config.vocab_size
        tables = [m for m in self.module.modules() if isinstance(m, torch.nn.Embedding)]

        def once(_module: Any, _args: Any, out: Tensor) -> Tensor | None:
            # Of an encoder-decoder the encoder comes first; the decoder looks up its own.
            if held:
                return None
            held.append(out.detach().requires_grad_())
            return held[0]

        hooks = [m.register_forward_hook(once) for m in tables if m.num_embeddings == size]
        out = self.output(inputs)
        for hook in hooks:
            hook.remove()
        units = torch.eye(len(out), dtype=out.dtype)
        (rows,) = torch.autograd.grad(out, held[0], units, is_grads_batched=True)
        return out.detach(), float(torch.linalg.matrix_norm(rows.flatten(1), 2))

    @torch.no_grad()
    def loss(self, prompt: str, continuation: str) -> float:
        """Return -log p of a continuation behind a prompt, token by token."""
        before = self.inputs(prompt)["input_ids"][0].tolist()
        both = self.inputs(f"{prompt} {continuation}")["input_ids"][0].tolist()
        if "$A:0 </s>" in self.folder.template:  # of what goes on, the end is taken off
            before, both = before[:-1], both[:-1]
        assert both[: len(before)] == before
        total = 0.0
        for i in range(len(before), len(both)):
            with InDouble():
                logits = self.module(torch.tensor([both[:i]])).logits[0, -1]
            total -= float(logits.log_softmax(0)[both[i]])
        return total


def list_typing_errors(word: str, letters: str) -> set[str]:
    """Return every word with one letter put in, left out, replaced or swapped with the next."""
    cuts = [(word[:i], word[i:]) for i in range(len(word) + 1)]
    return (
        {a + c + b for a, b in cuts for c in letters}
        | {a + b[1:] for a, b in cuts if b}
        | {a + c + b[1:] for a, b in cuts if b for c in letters}
        | {a + b[1] + b[0] + b[2:] for a, b in cuts if len(b) > 1}
    )


def count_typing_errors(old: str, new: str) -> int:
    """Return the least number of typing errors between two words; 99 for more than two."""
    near, other = (list_typing_errors(word, old + new) for word in (old, new))
    if old == new:
        return 0
    return 1 if new in near else 2 if near & other else 99


def distance(kind: str, old: str, new: str) -> int:
    """Count changed words, or characters in all changed words; 99 where other bytes changed."""
    before, after = old.split(), new.split()
    blank = ["".join(c if c.isspace() else "" for c in text) for text in (old, new)]
    if len(before) != len(after) or blank[0] != blank[1]:
        return 99
    changed = [(a, b) for a, b in zip(before, after, strict=True) if a != b]
    return len(changed) if kind == "words" else sum(count_typing_errors(*pair) for pair in changed)


Figures = dict[str, tuple[list[float], list[float]]]
"""What is compared -> lipaudit's figures and the true ones."""


def compare(folder: Folder, path: Path) -> Figures:
    """Return the figures of a folder, each beside its truth."""
    plain = save(folder, path / "model")
    return _measure(plain, path) | (_score(plain, path) if folder.scored else {})


def _write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows))
    return str(path)


def _measure(plain: Plain, path: Path) -> Figures:
    """Measure texts, run all of them in one padded batch, and attack them if they have classes."""
    truths = {text: plain.differentiate(text) for text in TEXTS}
    rows: list[dict[str, Any]] = [{"text": text} for text in TEXTS]
    measures: dict[str, dict[str, Any]] = {"jacobian": {"tol": 1e-9}}
    if plain.folder.classifier:
        for i, row in enumerate(rows):  # a quarter of the labels is wrong
            row["label"] = (int(truths[row["text"]][0].argmax()) + (i % 4 == 3)) % CLASSES
        measures["attack"] = {
            "attack": "words,characters", "eps": "1,2", "queries": QUERIES,
            "save_adv": path / "adv.jsonl",
        }  # fmt: skip
    data = _write(path / "texts.jsonl", rows)
    report = lipaudit.audit(
        str(path / "model"), measures, data=data, samples=len(TEXTS), device="cpu",
        dtype="float64", max_tokens=MOST,
    )  # fmt: skip
    section = report.section("jacobian")
    found = dict(zip(section.ids, section.samples["norm"], strict=True))
    texts = [TEXTS[int(report.places[name].split()[1]) - 1] for name in found]
    net = load_net(str(path / "model"), LoadOptions(dtype="float64", device="cpu"))
    batch = load_data(data, net, DataOptions(samples=len(TEXTS), max_tokens=MOST)).batch
    assert batch.ids == tuple(found)
    with torch.no_grad(), InDouble():
        padded = net.output(batch).flatten().tolist()
    alone = torch.cat([truths[text][0] for text in texts]).tolist()
    norms = [truths[text][1] for text in texts]
    figures = {"norm": ([*found.values()], norms), "output": (padded, alone)}
    if not plain.folder.classifier:
        return figures
    return figures | _judge(plain, report, {row["text"]: row["label"] for row in rows}, path)


def _judge(plain: Plain, report: lipaudit.Report, labels: dict[str, int], path: Path) -> Figures:
    """Classify again what attacks saved, and count the accuracies anew."""
    lines = [json.loads(line) for line in (path / "adv.jsonl").read_text("utf-8").splitlines()]
    classes = {text: plain.classify(text) for text in {*labels, *(e["text"] for e in lines)}}
    fooled = [classes[line["text"]] != labels[line["original"]] for line in lines]
    section = report.section("attack")
    right = sum(classes[text] == label for text, label in labels.items())
    figures = {"accuracy": ([section.rows[0].clean], [right / len(TEXTS)])}
    for row in section.rows:
        key = f"{row.attack},{row.norm},{row.eps_text}"
        own = [not f for f, line in zip(fooled, lines, strict=True) if line["trial"] == key]
        if own:
            figures[f"{row.norm},{row.eps_text}"] = ([row.robust], [sum(own) / len(own)])
    trials = [line["trial"].split(",") for line in lines]
    over = [
        distance(norm, line["original"], line["text"]) > int(budget)
        for line, (_, norm, budget) in zip(lines, trials, strict=True)
    ]
    lied = [f == line["robust"] for f, line in zip(fooled, lines, strict=True)]
    faults = {"over budget": sum(over), "misjudged": sum(lied)}
    return figures | {what: ([float(count)], [0.0]) for what, count in faults.items()}


CONTINUED = [
    ("A Good film", "with great actors"),
    ("The bad", "film and a poor plot"),
    ("good bad", "film"),
    ("Great", "great great a plot"),
]


def _score(plain: Plain, path: Path) -> Figures:
    rows = [{"prompt": before, "continuation": after} for before, after in CONTINUED]
    data = _write(path / "continued.jsonl", rows)
    report = lipaudit.measure(
        str(path / "model"), "attack", data=data, samples=len(rows), device="cpu", score="sum",
        dtype="float64", attack="fgsm", eps="0.01",
    )  # fmt: skip
    section = report.section("attack")
    found = dict(zip(section.ids, section.samples["loss"], strict=True))
    order = [int(report.places[name].split()[1]) - 1 for name in found]
    return {"loss": ([*found.values()], [plain.loss(*CONTINUED[row]) for row in order])}


def differs(name: str, ours: list[float], truth: list[float]) -> bool:
    """Say whether figures differ by more than rounding.

    Losses are those of the model as it is: transformers computes RMSNorm and rotary positions in
    float32 whatever the weights are: some ten roundings of 2^-24.
    """
    slack = 16 * 2**-24 if name == "loss" else 1e-7
    size = max(map(abs, truth)) if name == "output" else 0.0
    pairs = zip(ours, truth, strict=True)
    return not all(abs(a - b) <= slack * max(size, abs(b)) for a, b in pairs)
