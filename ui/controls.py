"""The sampling controls and the system prompt. They live in the browser: no event goes to Gradio's server."""

from typing import Any

import gradio as gr


def controls(chat: Any) -> None:
    """Lay out the controls and tie them to the page's code, through localpaged.* in the browser.

    chat: the component whose "select" event asks the controls to show the conversation's values.
    """
    prompt = gr.Textbox(
        label="System prompt",
        lines=3,
        max_lines=12,
        placeholder="How the model should answer",
        elem_id="lp-prompt",
    )
    temperature = gr.Slider(0, 2, 0.8, step=0.05, label="Temperature", elem_id="lp-temperature")
    top_p = gr.Slider(0.05, 1, 0.95, step=0.01, label="Top p", elem_id="lp-top_p")
    top_k = gr.Slider(0, 200, 0, step=1, label="Top k", elem_id="lp-top_k")
    min_p = gr.Slider(0, 0.5, 0, step=0.01, label="Min p", elem_id="lp-min_p")
    penalty = gr.Slider(0.8, 1.8, 1, step=0.01, label="Repetition penalty", elem_id="lp-penalty")
    longest = gr.Number(
        512,
        label="Longest answer (tokens)",
        placeholder="what fits the window",
        precision=0,
        minimum=1,
        elem_id="lp-longest",
    )
    seed = gr.Number(None, label="Seed", placeholder="a new one each time", precision=0, minimum=0, elem_id="lp-seed")
    gr.HTML(
        "<p class='lp-side-note'>These belong to the conversation and apply from the next answer on. Top k and"
        " min p at 0 and a penalty of 1 change nothing. The same seed draws the same answers.</p>",
        apply_default_css=False,
    )
    sampling = [temperature, top_p, top_k, min_p, penalty, longest, seed]
    for control in sampling:
        control.change(None, sampling, None, js="(...values) => { localpaged.setSampling(...values); }")
    prompt.change(None, [prompt], None, js="(text) => { localpaged.setSystemPrompt(text); }")
    chat.select(None, None, [*sampling, prompt], js="() => localpaged.controls()")
