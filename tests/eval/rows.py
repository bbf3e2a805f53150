"""A few rows in the formats of the six tasks, written for these tests, except WinoGrande's, which are from that set

(CC BY; K. Sakaguchi, R. Le Bras, C. Bhagavatula, Y. Choi, "WinoGrande: An Adversarial Winograd Schema Challenge at
Scale", 2019).
"""

import json
from pathlib import Path

ROWS = {
    "lambada_openai_test": [
        {"text": "the lamp was out and the stairs were dark, so before she went down she lit the lamp"},
        {"text": "he asked for salt, and when nobody answered he stood up, went to the kitchen and fetched the salt"},
        {"text": '"who is there?" called the old man. it was only the wind, and he laughed at himself and the wind'},
    ],
    "hellaswag_val": [
        {
            "query": "Baking bread: A woman pours flour into a bowl. she",
            "choices": [
                "adds water and yeast and begins to knead.",
                "throws the bowl out of the window.",
                "paints the flour green.",
                "sings to the bread until it is done.",
            ],
            "gold": 0,
        },
        {
            "query": "How to mend a tyre: Take the wheel off the bicycle. Find the hole by holding it under water.",
            "choices": ["Sell it.", "Mark the place where bubbles rise.", "Eat it slowly.", "Wait for rain."],
            "gold": 1,
        },
        {
            "query": "Sailing: Two boys push a small boat into the lake. they",
            "choices": ["fly away.", "read a book about boats.", "climb in and raise the sail.", "boil the lake."],
            "gold": 2,
        },
    ],
    "piqa_valid": [
        {"id": "1", "goal": "To dry a wet shoe,", "sol1": "stuff it with newspaper.", "sol2": "freeze it.", "label": 0},
        {"id": "2", "goal": "Open a jar", "sol1": "with a feather", "sol2": "by warming its lid", "label": 1},
        {"id": "3", "goal": "Find north", "sol1": "look at a compass", "sol2": "look at a spoon", "label": 0},
    ],
    "arc_easy_test": [
        {"question": "What do plants need to grow?", "choices": ["light", "music", "coins", "glass"], "gold": 0},
        {"question": "Which of these is a solid?", "choices": ["steam", "ice", "air"], "gold": 1},
        {"question": "What pulls a stone down?", "choices": ["wind", "sound", "gravity", "heat", "colour"], "gold": 2},
    ],
    "arc_challenge_test": [
        {"question": "A cup of hot tea cools because", "choices": ["heat leaves it", "cold enters it"], "gold": 0},
        {"question": "Salt in water can be won back by", "choices": ["a sieve", "boiling", "a magnet"], "gold": 1},
        {"question": "A shadow is longest at", "choices": ["noon", "sunset", "midnight", "ten o'clock"], "gold": 1},
    ],
    "winogrande_xl_dev": [
        {
            "sentence": "Sarah was a much better surgeon than Maria so _ always got the easier cases.",
            "option1": "Sarah",
            "option2": "Maria",
            "answer": "2",
        },
        {
            "sentence": "Sarah was a much better surgeon than Maria so _ always got the harder cases.",
            "option1": "Sarah",
            "option2": "Maria",
            "answer": "1",
        },
        {
            "sentence": "They were worried the wine would ruin the bed and the blanket, but the _ was't ruined.",
            "option1": "blanket",
            "option2": "bed",
            "answer": "2",
        },
    ],
}


def write_rows(folder: Path) -> Path:
    for name, rows in ROWS.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder
