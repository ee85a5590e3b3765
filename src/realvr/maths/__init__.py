"""The paper's equations as pure functions: torch and the standard library, nothing of models, data or training.

Shape legend, beside that of ``realvr.backbone.types``: B examples, G completions of a prompt, S text tokens, K latent
slots, D hidden width, N visual tokens, M negative prototypes, Y wrong answers, L layers, H heads, R query rows, V
vocabulary.

Every function computes in float32 or wider whatever it is given and keeps float64. A mask that leaves nothing gives
zeros that are still connected to the graph, so that ranks which differ in their data run the same collectives.
"""
