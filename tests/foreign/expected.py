"""Three rows, written out by hand: what every dump in this folder and in the tests of importers holds.

Row 0 is `11 12 | 13 14 15`, row 1 `21 22 23 | 24 25` and padding, row 2 padding and `32 | 33 34 35`; of row 2's answer
the second token is a tool's. P 3 prompt, A 3 answer tokens.
"""

PROMPTS = [[0, 11, 12], [21, 22, 23], [0, 0, 32]]
IDS = [[0, 11, 12, 13, 14, 15], [21, 22, 23, 24, 25, 0], [0, 0, 32, 33, 34, 35]]
ATTENTION = [[0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0], [0, 0, 1, 1, 1, 1]]
POSITIONS = [[0, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 4], [0, 0, 0, 1, 2, 3]]
ANSWERS = [[13, 14, 15], [24, 25, 0], [33, 34, 35]]
ACTIONS = [[1, 1, 1], [1, 1, 0], [1, 0, 1]]
LOG_PROBS = [[-0.5, -1.5, -0.25], [-2.0, -0.125, 0.0], [-3.0, -1.0, -4.5]]
ADVANTAGES = [[1.0, 1.0, 1.0], [-0.5, -0.5, 0.0], [2.0, 2.0, 2.0]]
STEP = 7
