// A list of the fields of cases, of which one is chosen.
import { html } from "./html.js";

/** `fields`: those to choose from; `take` is called with the name of one. */
export function Select({ id, label, value, fields, take }) {
  return html`<label for=${id}>${label} <select id=${id} value=${value} onChange=${(event) => take(event.currentTarget.value)}>
    ${fields.map((field) => html`<option key=${field.name} value=${field.name} selected=${field.name === value}>${field.label}</option>`)}</select></label>`;
}
