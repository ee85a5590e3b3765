// What diagnostics have measured of a case: bars over the latents, maps over the picture, matrices, facts. Everything was
// saved by them; nothing is computed here but colours. A case's numbers are read when it is opened, and drawn then.
const caseBrowser = (function () {
  const WIDTH = 600;
  // Viridis: its lightness grows with the value, so that it can be told apart without colour.
  const COLORS = [[68, 1, 84], [65, 68, 135], [42, 120, 142], [34, 168, 132], [122, 209, 81], [253, 231, 37]];

  function make(tag, attributes, children) {
    const made = document.createElement(tag);
    Object.entries(attributes || {}).forEach(function (pair) {
      if (pair[0] === "text") made.textContent = pair[1];
      else if (pair[1] !== null) made.setAttribute(pair[0], pair[1]);
    });
    (children || []).forEach(function (child) { made.append(child); });
    return made;
  }
  function draw(tag, attributes, children) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    Object.entries(attributes || {}).forEach(function (pair) {
      if (pair[0] === "text") made.textContent = pair[1];
      else made.setAttribute(pair[0], pair[1]);
    });
    (children || []).forEach(function (child) { made.append(child); });
    return made;
  }
  function color(share) {
    const place = Math.min(Math.max(share, 0), 1) * (COLORS.length - 1), first = Math.min(Math.floor(place), COLORS.length - 2);
    const mixed = COLORS[first].map(function (value, index) { return Math.round(value + (place - first) * (COLORS[first + 1][index] - value)); });
    return "rgb(" + mixed.join(", ") + ")";
  }
  function number(value) {
    if (value === null) return "none";
    const text = value !== 0 && (Math.abs(value) < 0.001 || Math.abs(value) >= 1e5) ? value.toExponential(2) : String(Number(value.toPrecision(3)));
    return signed(text);
  }
  // Every digit that was saved, with the minus of the page.
  function exact(value) { return value === null ? "none" : signed(String(value)); }
  function signed(text) { return text.replace(/-/g, "−").replace("e+", "e"); }
  function unitOf(part) { return part.unit ? ", " + part.unit : ""; }
  function queryName(query) { return typeof query === "number" ? "z" + query : query; }
  function layerName(layer) { return typeof layer === "number" ? "layer " + layer : layer; }

  // -------------------------------------------------------------------- scale, cells

  function scaleOf(grids, part) {
    const known = grids.flat(2).filter(function (value) { return value !== null; });
    const largest = known.reduce(function (one, other) { return Math.max(one, other); }, -Infinity);
    const high = part.high === null ? (largest > part.low ? largest : part.low + 1) : part.high;
    return { low: part.low, high: high, own: part.high === null, known: known.length > 0 };
  }
  function shareOf(value, scale) { return (value - scale.low) / (scale.high - scale.low); }
  function legend(scale, part) {
    const stops = COLORS.map(function (_, index) { return color(index / (COLORS.length - 1)); }).join(", ");
    const bar = make("span", { class: "ramp", "aria-hidden": "true", style: "background: linear-gradient(to right, " + stops + ")" });
    const ends = scale.own ? number(scale.high) + " (this map’s largest)" : number(scale.high);
    return make("span", { class: "scale" }, [make("span", { text: number(scale.low) }), bar, make("span", { text: ends + unitOf(part) })]);
  }
  function largestCell(grids) {
    let best = null;
    grids.forEach(function (grid, picture) {
      grid.forEach(function (row, y) {
        row.forEach(function (value, x) {
          if (value !== null && (best === null || value > best.value)) best = { picture: picture, y: y, x: x, value: value };
        });
      });
    });
    return best;
  }
  function heat(svg, grid, size, scale, tell) {
    const high = Math.max(1, Math.round(WIDTH * size[1] / size[0])), wide = WIDTH / grid[0].length, tall = high / grid.length;
    svg.setAttribute("viewBox", "0 0 " + WIDTH + " " + high);
    svg.replaceChildren();
    grid.forEach(function (row, y) {
      row.forEach(function (value, x) {
        if (value === null) return;
        const cell = draw("rect", { x: x * wide, y: y * tall, width: wide + 0.4, height: tall + 0.4, fill: color(shareOf(value, scale)), "data-value": value });
        cell.append(draw("title", { text: "row " + (y + 1) + ", column " + (x + 1) + ": " + number(value) }));
        if (tell) cell.addEventListener("mouseenter", function () { tell("Row " + (y + 1) + ", column " + (x + 1) + ": " + exact(value)); });
        svg.append(cell);
      });
    });
  }

  // -------------------------------------------------------------------- parts of a panel

  function bars(part, chosen, choose) {
    const latents = !part.labels.length, count = part.series[0].values.length;
    const labels = latents ? part.series[0].values.map(function (_, index) { return "z" + (index + 1); }) : part.labels;
    const ranges = {};
    part.series.forEach(function (series) {
      const range = ranges[series.unit] = ranges[series.unit] || { low: 0, high: 0 };
      series.values.forEach(function (value) {
        if (value !== null) { range.low = Math.min(range.low, value); range.high = Math.max(range.high, value); }
      });
    });
    const head = make("tr", {}, [make("td", {})].concat(labels.map(function (label, index) {
      if (!latents) return make("th", { scope: "col", text: label });
      const button = make("button", { type: "button", class: "latent", "data-latent": index + 1, "aria-pressed": String(chosen === index + 1), text: label, title: "Choose " + label });
      button.addEventListener("click", function () { choose(index + 1); });
      return make("th", { scope: "col" }, [button]);
    })));
    const rows = part.series.map(function (series) {
      const range = ranges[series.unit], span = range.high - range.low || 1, zero = 100 * -range.low / span;
      const name = make("th", { scope: "row", title: series.about || null }, [make("span", { text: series.name }), make("small", { text: series.unit })]);
      return make("tr", {}, [name].concat(series.values.map(function (value, index) {
        const cell = make("td", { "data-value": value === null ? "none" : value, class: latents && chosen === index + 1 ? "chosen" : null, title: labels[index] + ": " + exact(value) });
        if (latents) cell.addEventListener("click", function () { choose(index + 1); });
        const plot = make("span", { class: "plot", "aria-hidden": "true" });
        if (value !== null) {
          const tall = 100 * Math.abs(value) / span, from = value < 0 ? zero - tall : zero;
          plot.append(make("span", { class: value < 0 ? "bar below" : "bar", style: "bottom: " + from.toFixed(2) + "%; height: " + tall.toFixed(2) + "%" }));
        }
        plot.append(make("span", { class: "zero", style: "bottom: " + zero.toFixed(2) + "%" }));
        cell.append(plot, make("span", { class: "value", text: value === null ? "–" : number(value) }));
        return cell;
      })));
    });
    const caption = make("caption", { class: "unseen", text: part.series.map(function (one) { return one.name; }).join(", ") });
    const table = make("table", { class: "bars" + (count > 16 ? " many" : ""), style: "--columns: " + count }, [caption, make("thead", {}, [head]), make("tbody", {}, rows)]);
    const notes = part.series.filter(function (one) { return one.about; }).map(function (one) {
      return make("li", {}, [make("b", { text: one.name + ": " }), one.about]);
    });
    return [make("div", { class: "wide", role: "region", tabindex: "0", "aria-label": "Bars" }, [table])].concat(notes.length ? [make("ul", { class: "about" }, notes)] : []);
  }
  function matrix(part) {
    const scale = scaleOf([part.values], part), cell = 14, left = 8 * Math.min(16, Math.max.apply(null, part.rows.map(function (one) { return one.length; })));
    const top = 7 * Math.min(16, Math.max.apply(null, part.columns.map(function (one) { return one.length; }))) + 6;
    const wide = left + cell * part.columns.length + 4, high = top + cell * part.rows.length + 4, best = largestCell([part.values]);
    const words = part.name + ", " + part.rows.length + " by " + part.columns.length + (best ? "; largest " + number(best.value) + " at " + part.rows[best.y] + ", " + part.columns[best.x] : "");
    const svg = draw("svg", { class: "matrix", viewBox: "0 0 " + wide + " " + high, width: wide, height: high, role: "img", "aria-label": words });
    part.rows.forEach(function (label, y) { svg.append(draw("text", { x: left - 4, y: top + cell * (y + 0.75), "text-anchor": "end", text: label.slice(0, 16) })); });
    part.columns.forEach(function (label, x) {
      svg.append(draw("text", { transform: "translate(" + (left + cell * (x + 0.75)) + " " + (top - 4) + ") rotate(-90)", text: label.slice(0, 16) }));
    });
    part.values.forEach(function (row, y) {
      row.forEach(function (value, x) {
        if (value === null) return;
        const one = draw("rect", { x: left + cell * x, y: top + cell * y, width: cell - 1, height: cell - 1, fill: color(shareOf(value, scale)), "data-value": value });
        one.append(draw("title", { text: part.rows[y] + " → " + part.columns[x] + ": " + exact(value) }));
        svg.append(one);
      });
    });
    const caption = make("p", { class: "hint", text: part.name + ", " + layerName(part.layer) });
    return [caption, make("div", { class: "wide", role: "region", tabindex: "0", "aria-label": part.name }, [svg]), make("p", { class: "hint" }, [legend(scale, part)])];
  }
  function facts(part) {
    const head = part.header.length ? [make("thead", {}, [make("tr", {}, part.header.map(function (text) { return make("th", { scope: "col", text: text }); }))])] : [];
    const rows = part.rows.map(function (row) {
      return make("tr", {}, row.map(function (text, place) { return place ? make("td", { text: text }) : make("th", { scope: "row", text: text }); }));
    });
    return [make("div", { class: "wide", role: "region", tabindex: "0", "aria-label": "Facts" }, [make("table", { class: "facts" }, head.concat([make("tbody", {}, rows)]))])];
  }

  // -------------------------------------------------------------------- one browser

  // `changed` is called when a reader has chosen something here.
  function browse(root, changed) {
    const sources = Array.from(root.querySelectorAll("script[data-panels]")), read = {}, id = root.id;
    const state = { overlay: "", query: 1, layer: "mean", walk: false };
    let measured = [], view = 0, boards = [], overlays = [];

    const choice = make("select", { id: id + "-overlay" }), layers = make("select", { id: id + "-layer" });
    const queries = make("div", { class: "queries", role: "group", "aria-label": "Attention of" });
    const walk = make("button", { type: "button", "aria-pressed": "false", text: "Whole walk" });
    const told = make("p", { class: "hint overlay-told", "aria-live": "polite" }), under = make("span", { class: "under" });
    const pick = make("span", { class: "pick" }, [make("label", { for: id + "-layer", text: "Layer" }), layers, walk]);
    const detail = make("div", { class: "overlay-detail" });
    const controls = make("fieldset", { class: "overlay" }, [
      make("legend", {}, [make("label", { for: id + "-overlay", text: "Over the picture" })]), choice, detail, told,
    ]);
    const cards = make("div", { class: "measured", role: "group", "aria-label": "Measured of this case" });
    choice.addEventListener("change", function () { state.overlay = choice.value; changed(); });
    layers.addEventListener("change", function () { state.layer = overlay() ? overlay().layers[layers.selectedIndex] : "mean"; changed(); });
    walk.addEventListener("click", function () { state.walk = !state.walk; changed(); });

    function open(place, side, drawn) {
      if (!read[place]) read[place] = sources[place] ? JSON.parse(sources[place].textContent) : [];
      measured = read[place];
      view = side;
      boards = drawn;
      overlays = [];
      measured.forEach(function (one) {
        one.views[view].forEach(function (panel) {
          panel.parts.forEach(function (part) {
            if (part.kind === "overlay") overlays.push({ key: one.name + "/" + part.name, label: part.name + " (" + (panel.title || one.title) + ")", part: part });
          });
        });
      });
    }
    function overlay() {
      const found = overlays.find(function (one) { return one.key === state.overlay; });
      return found ? found.part : null;
    }
    // The map that is chosen: of another layer or query where the chosen one has none.
    function map(part) {
      let query = part.queries.indexOf(state.query), layer = part.layers.indexOf(state.layer);
      if (query < 0) query = 0;
      if (layer < 0) layer = Math.max(0, part.layers.indexOf("mean"));
      const same = part.maps.filter(function (one) { return one[0] === query; });
      const found = same.find(function (one) { return one[1] === layer; }) || same[0];
      return { query: part.queries[found[0]], layer: part.layers[found[1]], grids: found[2] };
    }
    function known() {
      const found = {};
      measured.forEach(function (one) {
        one.views.flat().forEach(function (panel) {
          panel.parts.forEach(function (part) {
            if (part.kind === "overlay") found[one.name + "/" + part.name] = part.name + " (" + (panel.title || one.title) + ")";
          });
        });
      });
      if (state.overlay && !found[state.overlay]) found[state.overlay] = state.overlay.split("/").slice(1).join("/");
      return found;
    }
    function showOverlay() {
      const part = overlay(), names = known();
      controls.hidden = !measured.some(function (one) { return one.views.flat().some(function (panel) { return panel.parts.some(function (p) { return p.kind === "overlay"; }); }); }) && !state.overlay;
      choice.replaceChildren.apply(choice, [make("option", { value: "", text: "The walk of the latents" })].concat(Object.keys(names).map(function (key) {
        return make("option", { value: key, text: names[key] });
      })));
      choice.value = state.overlay;
      if (part === null) detail.replaceChildren();
      else if (!detail.childElementCount) detail.append(queries, pick);
      root.classList.toggle("overlaid", part !== null);
      root.classList.toggle("walking", part === null || state.walk);
      walk.setAttribute("aria-pressed", String(state.walk));
      boards.forEach(function (board) { board.heat.replaceChildren(); });
      if (part === null) {
        told.replaceChildren(state.overlay ? "Not measured for this picture." : "");
        return;
      }
      const made = map(part), scale = scaleOf(made.grids, part), best = largestCell(made.grids), focused = queries.contains(document.activeElement);
      queries.replaceChildren.apply(queries, part.queries.map(function (query) {
        const button = make("button", { type: "button", "data-query": query, "aria-pressed": String(query === made.query), text: queryName(query) });
        button.addEventListener("click", function () { choose(query); });
        return button;
      }));
      if (focused) queries.querySelector('[aria-pressed="true"]').focus({ preventScroll: true });
      layers.replaceChildren.apply(layers, part.layers.map(function (layer) { return make("option", { text: layerName(layer) }); }));
      layers.selectedIndex = part.layers.indexOf(made.layer);
      boards.forEach(function (board, place) {
        if (made.grids[place]) heat(board.heat, made.grids[place], board.size, scale, function (text) { under.textContent = text; });
      });
      const words = queryName(made.query) + ", " + layerName(made.layer) + (best ? ": largest " + number(best.value) + " at row " + (best.y + 1) + ", column " + (best.x + 1) + (boards.length > 1 ? " of picture " + (best.picture + 1) : "") : "") + ". ";
      under.textContent = "";
      told.replaceChildren(legend(scale, part), make("span", { text: words + [part.about, part.note].filter(Boolean).join(" ") }), under);
    }
    function choose(latent) {
      state.query = latent;
      changed();
    }
    function card(one) {
      const body = [make("h4", { text: one.title, title: one.about || null })];
      one.views[view].forEach(function (panel) {
        if (panel.title && panel.title !== one.title) body.push(make("h5", { text: panel.title }));
        shown(panel.parts).forEach(function (part) {
          if (part.kind === "bars") body.push.apply(body, bars(part, state.query, choose));
          else if (part.kind === "matrix") body.push.apply(body, matrix(part));
          else if (part.kind === "facts") body.push.apply(body, facts(part));
          else body.push(offer(one, part));
        });
        if (panel.note) body.push(make("p", { class: "hint", text: panel.note }));
      });
      return make("section", { class: "part", "data-test": one.name, "aria-label": one.title }, body);
    }
    // What has nothing to show of the picture, in one line: names by the reason, as explorer.py writes them.
    function leftOut() {
      const names = {};
      measured.forEach(function (one) {
        if (one.views[view].length) return;
        const elsewhere = one.views.some(function (other) { return other.length; });
        const why = one.missing ? "Not shown, " + one.missing : elsewhere ? "Not measured for this picture of the case" : "Not measured for this case";
        (names[why] = names[why] || []).push(one.title);
      });
      const text = Object.keys(names).map(function (why) { return why + ": " + names[why].join(", ") + "."; }).join(" ");
      return text ? [make("p", { class: "none left-out", text: text })] : [];
    }
    // Of matrices with one name the one of the chosen layer, else the first.
    function shown(parts) {
      return parts.filter(function (part) {
        if (part.kind !== "matrix") return true;
        const same = parts.filter(function (other) { return other.kind === "matrix" && other.name === part.name; });
        return part === (same.find(function (other) { return other.layer === state.layer; }) || same[0]);
      });
    }
    function offer(one, part) {
      const key = one.name + "/" + part.name, on = state.overlay === key;
      const button = make("button", { type: "button", "data-offer": part.name, "aria-pressed": String(on), text: "Show " + part.name + " over the picture" });
      button.addEventListener("click", function () { state.overlay = on ? "" : key; changed(); });
      return make("p", {}, [button]);
    }
    function show() {
      showOverlay();
      // A button that has the focus keeps it while it is drawn again; among the latents it goes with the choice.
      const focus = document.activeElement, test = cards.contains(focus) ? focus.closest(".part").dataset.test : null;
      const latent = test !== null && focus.dataset.latent, offered = test !== null && focus.dataset.offer;
      cards.replaceChildren.apply(cards, measured.filter(function (one) { return one.views[view].length; }).map(card).concat(leftOut()));
      const again = Array.from(cards.children).find(function (one) { return one.dataset.test === test; });
      const button = again && Array.from(again.querySelectorAll("button")).find(function (one) {
        return latent ? one.dataset.latent === String(state.query) : offered && one.dataset.offer === offered;
      });
      if (button) button.focus({ preventScroll: true });
    }

    // What keys do; true where one did something.
    function key(name, count) {
      const part = overlay(), all = overlays.map(function (one) { return one.key; });
      if (name === "latent") {
        const list = part ? part.queries : Array.from({ length: count }, function (_, index) { return index + 1; });
        state.query = list[(Math.max(0, list.indexOf(state.query)) + arguments[2] + list.length) % list.length];
      } else if (name === "query") {
        state.query = arguments[2];
      } else if (name === "layer" && part) {
        const at = part.layers.indexOf(map(part).layer);
        state.layer = part.layers[(at + arguments[2] + part.layers.length) % part.layers.length];
      } else if (name === "overlay" && all.length) {
        const list = [""].concat(all);
        state.overlay = list[(list.indexOf(state.overlay) + 1) % list.length];
      } else if (name === "walk" && part) {
        state.walk = !state.walk;
      } else {
        return false;
      }
      changed();
      return true;
    }
    function clear() {
      Object.assign(state, { overlay: "", query: 1, layer: "mean", walk: false });
    }
    function asLink() {
      return { overlay: state.overlay, latent: state.query === 1 ? "" : String(state.query), layer: state.layer === "mean" ? "" : String(state.layer) };
    }
    function fromLink(values) {
      function plain(text) { return /^-?\d+$/.test(text) ? Number(text) : text; }
      state.overlay = values.get("overlay") || "";
      state.query = plain(values.get("latent") || "1");
      state.layer = plain(values.get("layer") || "mean");
    }
    return { controls: controls, cards: cards, open: open, show: show, key: key, clear: clear, state: state, asLink: asLink, fromLink: fromLink };
  }

  // -------------------------------------------------------------------- filters

  const OUTCOMES = {
    right: "right on every picture", failed: "wrong on a picture", other: "answers for the other picture", wrong: "wrong for both pictures",
    unread: "no readable answer", apart: "the two models differ",
  };
  function outcomes(one) {
    const replies = one.views.map(function (view) { return view.replies; }), found = [];
    const first = replies.map(function (list) { return list[0].verdict; });
    found.push(first.every(function (verdict) { return verdict === "right"; }) ? "right" : "failed");
    ["other", "wrong", "unread"].forEach(function (verdict) { if (first.includes(verdict)) found.push(verdict); });
    if (replies.some(function (list) { return list.length > 1 && list[0].verdict !== list[1].verdict; })) found.push("apart");
    return found;
  }
  // Selects over task, edit and outcome; those with one value are left out. `changed` gets the numbers of cases that fit.
  function filters(root, cases, changed) {
    const facets = [
      { name: "task", label: "Task", of: function (one) { return one.task ? [one.task] : []; }, words: {} },
      { name: "edit", label: "Edit", of: function (one) { return one.edit ? [one.edit] : one.edit === "" ? ["none"] : []; }, words: { none: "no edited picture" } },
      { name: "outcome", label: "Outcome", of: outcomes, words: OUTCOMES },
    ];
    const count = make("span", { class: "count", role: "status" }), clear = make("button", { type: "button", text: "Clear" }), parts = [];
    facets.forEach(function (facet) {
      const tally = {};
      cases.forEach(function (one) { facet.of(one).forEach(function (value) { tally[value] = (tally[value] || 0) + 1; }); });
      const values = facet.name === "outcome" ? Object.keys(OUTCOMES).filter(function (value) { return tally[value]; }) : Object.keys(tally);
      if (values.length < 2) return;
      const id = root.id + "-" + facet.name;
      facet.select = make("select", { id: id }, [make("option", { value: "", text: "all" })].concat(values.map(function (value) {
        return make("option", { value: value, text: (facet.words[value] || value.replace(/_/g, " ")) + " (" + tally[value] + ")" });
      })));
      facet.select.addEventListener("change", apply);
      parts.push(make("span", { class: "pick" }, [make("label", { for: id, text: facet.label }), facet.select]));
    });
    const used = facets.filter(function (facet) { return facet.select; });
    clear.addEventListener("click", reset);
    const element = make("div", { class: "filters", role: "group", "aria-label": "Filter cases" }, used.length ? parts.concat([count, clear]) : []);
    element.hidden = !used.length;
    function keeps(one) {
      return used.every(function (facet) { return !facet.select.value || facet.of(one).includes(facet.select.value); });
    }
    function apply() {
      const kept = cases.map(function (_, place) { return place; }).filter(function (place) { return keeps(cases[place]); });
      count.textContent = kept.length + " of " + cases.length + " cases";
      clear.disabled = kept.length === cases.length;
      changed(kept);
    }
    function reset() {
      used.forEach(function (facet) { facet.select.value = ""; });
      apply();
      if (used.length) used[0].select.focus({ preventScroll: true });
    }
    function asLink() {
      const found = {};
      used.forEach(function (facet) { found[facet.name] = facet.select.value; });
      return found;
    }
    function fromLink(values) {
      used.forEach(function (facet) {
        facet.select.value = values.get(facet.name) || "";
        if (facet.select.selectedIndex < 0) facet.select.value = "";
      });
      apply();
    }
    return { element: element, focus: function () { if (used.length) used[0].select.focus(); }, reset: reset, apply: apply, asLink: asLink, fromLink: fromLink };
  }

  return { browse: browse, filters: filters, make: make };
})();
