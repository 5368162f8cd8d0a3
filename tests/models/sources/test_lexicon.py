"""What is a word is decided by the kind of a tokenizer, not by a look at its entries."""

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from lipaudit.attacks.text import BEGINS, GOES_ON
from lipaudit.models.sources.texts import read_lexicon


def test_a_byte_level_vocabulary_that_holds_hashes_is_no_wordpiece():
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*letters, "##", "###", "####", "Ġa", "ab", "Ġab"]
    ids = {token: i for i, token in enumerate(tokens)}
    merges = [("#", "#"), ("##", "#"), ("##", "##"), ("Ġ", "a"), ("a", "b"), ("Ġa", "b")]
    own = Tokenizer(models.BPE(ids, merges))
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    own.decoder = decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=own)
    known = read_lexicon(fast, len(ids), lambda texts, _most, **more: fast(*texts, **more))
    assert known.kinds[ids["Ġab"]] == BEGINS
    assert known.kinds[ids["ab"]] == GOES_ON
    words = known.words([ids["ab"], ids["Ġa"], ids["b"], ids["Ġab"]])
    assert words == ((ids["ab"],), (ids["Ġa"], ids["b"]), (ids["Ġab"],))
    assert known.read((" ab",), 9) == ((ids["Ġab"],), ((0, 1, 3),))
