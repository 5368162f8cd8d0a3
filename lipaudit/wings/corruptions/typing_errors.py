"""Random typing errors in texts. The attack `characters` searches among the same errors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lipaudit.attacks.rewriting import list_errors, spell_words

if TYPE_CHECKING:
    import random

    from lipaudit.attacks.text import Draft, Lexicon


def mistype(draft: Draft, draw: random.Random, lexicon: Lexicon, kind: str, count: int) -> Draft:
    """Return a text with random typing errors of one kind.

    Each error first draws a word, with a probability proportional to the length of the word. Then
    it draws one of all possible errors of this kind in the word.

    Args:
        draft: the text, with its characters.
        draw: source of random numbers.
        lexicon: the vocabulary.
        kind: one of `lipaudit.attacks.kinds.TYPING`.
        count: number of errors; fewer if the text has no room for them.
    """
    for _ in range(count):
        words, letters = spell_words(draft, lexicon)
        errors = {}
        for i, word in words.items():
            spellings = list_errors(word, letters)[kind] - {word}
            if spellings:
                errors[i] = spellings
        if not errors:
            continue
        lengths = [len(words[i]) for i in errors]
        i = draw.choices(list(errors), lengths)[0]
        error = draw.choice(sorted(errors[i]))
        draft = draft.with_word(i, draft.words[i], error)
    return draft
