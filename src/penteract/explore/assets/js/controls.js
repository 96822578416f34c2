// The controls: drawn from what the planner says of each, so that none is listed twice.
import { explained } from "./tip.js";
import { html, useEffect, useRef, useState } from "./html.js";
import { at, put } from "./state.js";

/** All controls, group by group. */
export function Controls({ opening, question, settings, broken, change }) {
  const faults = new Map(broken.map((rule) => [rule.control, rule.text]));
  return html`<form class="controls" aria-label="Layout" onSubmit=${(event) => event.preventDefault()}>
    ${opening.controls.map(
      (group) => html`<details class="group" key=${group.title} open=${group.open}>
        <summary>${group.title}</summary>
        ${group.controls.map(
          (control) => html`<${Row} key=${control.name} control=${control} setting=${settings?.[control.name]}
            value=${at(question, control.name)} fault=${faults.get(control.name)} opening=${opening}
            change=${(value) => change(put(question, control.name, value))} />`,
        )}
      </details>`,
    )}
  </form>`;
}

function Row({ control, setting, value, fault, opening, change }) {
  const id = `c-${control.name.replace(".", "-")}`;
  const note = fault ?? setting?.idle ?? "";
  const kinds = { degree: Degree, count: Count, choice: Choice, switch: Switch, model: Model };
  const about = { id: `${id}-note`, text: note };
  const names = ["row", control.input, control.dimension && `dim-${control.dimension}`, setting?.idle && "idle",
    fault && "fault"].filter(Boolean).join(" ");
  return html`<div class=${names}>
    <label for=${id}>
      ${control.dimension && html`<b class="badge">${control.dimension}</b>`}
      <span>${control.label}</span>
    </label>
    <button type="button" class="help" aria-label=${`About ${control.label}`} ...${explained(control.about)}>?</button>
    <${kinds[control.input]} id=${id} control=${control} setting=${setting} value=${value} change=${change}
      describedby=${note ? about.id : undefined} opening=${opening} />
    ${note && html`<p class="note" id=${about.id}>${note}</p>`}
  </div>`;
}

/** A number that is taken when it is complete: after a short pause, or at once with Enter. */
function Number_({ id, control, setting, value, change, describedby }) {
  const shown = String(value ?? setting?.value ?? "");
  const [text, set] = useState(shown);
  const timer = useRef(0);
  useEffect(() => set(shown), [shown]);
  const take = (written) => {
    clearTimeout(timer.current);
    const number = Number(written);
    if (written.trim() !== "" && Number.isFinite(number) && number !== value) change(number);
  };
  const whole = Number.isInteger(control.most) && control.most > 1;
  return html`<input id=${id} class="number" type="number" inputmode="decimal" value=${text} min=${control.least}
    max=${control.most} step=${whole ? 1 : "any"} aria-describedby=${describedby}
    onInput=${(event) => {
      const written = event.currentTarget.value;
      set(written);
      clearTimeout(timer.current);
      timer.current = setTimeout(() => take(written), 350);
    }}
    onChange=${(event) => take(event.currentTarget.value)} />`;
}

const Count = Number_;

/** A slider over the sizes that make sense, and a field for any other. */
function Degree(props) {
  const { id, control, setting, value, change } = props;
  const choices = setting?.choices ?? [];
  const now = value ?? setting?.value;
  const place = choices.findIndex((choice) => choice.value === now);
  const told = choices[place]?.why_not ? `${now}: ${choices[place].why_not}` : String(now ?? "");
  return html`<${Number_} ...${props} />
    <div class="slide">
      <input type="range" aria-label=${`${control.label}, by sizes`} aria-valuetext=${told} min="0"
        max=${Math.max(0, choices.length - 1)} step="1" value=${Math.max(0, place)} disabled=${choices.length < 2}
        data-for=${id} onInput=${(event) => change(choices[Number(event.currentTarget.value)].value)} />
      <div class="stops" aria-hidden="true">
        ${choices.map((c, i) => html`<i key=${c.value} class=${(c.why_not ? "no" : "") + (i === place ? " now" : "")}
          title=${c.why_not ? `${c.text}: ${c.why_not}` : c.text}></i>`)}
      </div>
    </div>`;
}

function Choice({ id, control, setting, value, change, describedby }) {
  const free = control.name.startsWith("layout.");
  const choices = setting?.choices ?? [];
  const now = free && value === undefined ? "" : String(value ?? setting?.value ?? "");
  const take = (written) => {
    const found = choices.find((choice) => String(choice.value) === written);
    change(written === "" || (!free && found?.value === "auto") ? undefined : found.value);
  };
  const auto = setting && !setting.chosen ? `auto · ${setting.text}` : "auto";
  return html`<select id=${id} value=${now} aria-describedby=${describedby}
    onChange=${(event) => take(event.currentTarget.value)}>
    ${free && html`<option value="">${auto}</option>`}
    ${choices.map((choice) => html`<option key=${choice.value} value=${String(choice.value)}
      disabled=${Boolean(choice.why_not) && String(choice.value) !== now} title=${choice.why_not}>${choice.text}</option>`)}
  </select>`;
}

function Switch({ id, control, setting, value, change, describedby }) {
  const free = control.name.startsWith("layout.");
  const on = Boolean(value ?? setting?.value);
  return html`<input id=${id} type="checkbox" role="switch" checked=${on} aria-describedby=${describedby}
    onChange=${(event) => change(event.currentTarget.checked ? true : free ? undefined : false)} />`;
}

function Model({ id, value, change, opening, describedby }) {
  const own = value?.config !== undefined;
  const families = new Map();
  for (const model of opening.models) {
    const family = model.source === "for learning" ? "for learning" : model.name.split(/[-\d]/)[0];
    families.set(family, [...(families.get(family) ?? []), model]);
  }
  return html`<select id=${id} value=${own ? "" : value?.name} aria-describedby=${describedby}
      onChange=${(event) => event.currentTarget.value && change({ name: event.currentTarget.value })}>
      ${own && html`<option value="">${value.name} (config.json)</option>`}
      ${[...families].map(([family, models]) => html`<optgroup key=${family} label=${family}>
        ${models.map((model) => html`<option key=${model.name} value=${model.name}>${model.text}</option>`)}
      </optgroup>`)}
    </select>
    <label class="file">or a config.json …
      <input type="file" accept=".json,application/json" onChange=${(event) => take(event.currentTarget.files[0], change)} />
    </label>`;
}

/** Read a config.json that was chosen or dropped. What is wrong with it, the planner says. */
export async function take(file, change) {
  if (!file || file.size > 2 ** 19) return;
  let config = null;
  try {
    config = JSON.parse(await file.text());
  } catch {
    config = {};
  }
  const named = typeof config?._name_or_path === "string" ? config._name_or_path.split("/").pop() : "";
  change({ name: (named || file.name).slice(0, 100), config });
}
