# SPDX-License-Identifier: MIT
"""The two pages of a calibration report, as jinja2 templates."""

from __future__ import annotations

HTML = """<!doctype html><html><head><meta charset="utf-8">
<title>Calibration of {{ record.model }}</title><style>
body{font-family:sans-serif;margin:2em;max-width:75em}table{border-collapse:collapse;font-size:90%}
td,th{padding:.2em .6em;text-align:right;border-bottom:1px solid #ddd}
td:first-child,th:first-child{text-align:left}.bad{background:#fbe3e3}img{max-width:100%}
</style></head><body>
<h1>Calibration of {{ record.model }}</h1>
<p>{{ lead }}</p>
{% for line in failures %}<p class="bad">{{ line }}</p>{% endfor %}
<h2>Figures</h2>
<table>{% for name, value in figures.items() %}
<tr><td>{{ name }}</td><td>{{ value|short }}</td></tr>{% endfor %}</table>
{% if quality %}<h2>Perplexity</h2>
<table><tr><th>text</th><th>model</th><th>perplexity</th><th>factor</th><th>KL (nats)</th>
<th>same top token</th></tr>
{% for text in quality.texts %}<tr><td>{{ text.text }}</td><td>{{ text.baseline.name }}</td>
<td>{{ '%.3f'|format(text.baseline.perplexity) }}</td><td>1</td><td></td><td></td></tr>
{% for arm in text.candidates %}<tr><td></td><td>{{ arm.name }}</td>
<td>{{ '%.3f'|format(arm.perplexity) }}</td><td>{{ '%.4f'|format(arm.perplexity_factor) }}</td>
<td>{{ '%.4f'|format(arm.kl_divergence) }}</td><td>{{ arm.top1_agreement|percent }}</td></tr>
{% endfor %}{% endfor %}</table>{% endif %}
{% for name, png in images.items() %}<h2>{{ name|capitalize }}</h2>
<p><img alt="{{ name }}" src="data:image/png;base64,{{ png }}"></p>{% endfor %}
{% if record.mixes %}<h2>Mixes compared</h2>
<table><tr><th>16-bit inputs</th><th>bf16 weights</th><th>estimated factor</th><th></th></tr>
{% for mix in record.mixes %}<tr><td>{{ mix.inputs_share|percent }}</td>
<td>{{ mix.weights_share|percent }}</td><td>{{ '%.4f'|format(mix.factor) }}</td>
<td>{{ 'written' if mix.chosen else '' }}</td></tr>{% endfor %}</table>{% endif %}
<h2>Decoder layers</h2>
<table><tr>{% for name in layer_header %}<th>{{ name }}</th>{% endfor %}</tr>
{% for row in layers %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</table>
<h2>Worst linears</h2>
<table><tr>{% for name in header %}<th>{{ name }}</th>{% endfor %}</tr>
{% for row in worst %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</table>
<h2>All linears</h2><details><summary>{{ rows|length }} in model order</summary>
<table><tr>{% for name in header %}<th>{{ name }}</th>{% endfor %}</tr>
{% for row in rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</table></details>
</body></html>
"""

MARKDOWN = """# Calibration of {{ record.model }}

{{ lead }}
{% for line in failures %}
- **{{ line }}**{% endfor %}

| figure | value |
| :-- | --: |
{% for name, value in figures.items() %}| {{ name }} | {{ value|short }} |
{% endfor %}
{% if quality_table %}## Perplexity

{{ quality_table }}

{% endif %}{% for name, file in images.items() %}## {{ name|capitalize }}

![{{ name }}]({{ file }})

{% endfor %}{% if record.mixes %}## Mixes compared

| 16-bit inputs | bf16 weights | estimated factor | |
| --: | --: | --: | :-- |
{% for mix in record.mixes %}| {{ mix.inputs_share|percent }} | {{ mix.weights_share|percent }} \
| {{ '%.4f'|format(mix.factor) }} | {{ 'written' if mix.chosen else '' }} |
{% endfor %}
{% endif %}## Decoder layers

{{ layer_table }}

## Worst linears

{{ worst_table }}

## All linears

{{ table }}
"""
