/* Search from the disk: browsers start no Worker for file:// pages, so the worker's script runs in a hidden frame. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.waiting = [];
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.appendChild(frame);
      const inside = frame.contentWindow;
      inside.importScripts = (...urls) =>
        urls.reduce((before, one) => before.then(() => this.load(frame, one)), Promise.resolve());
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.load(frame, url).then(() => {
        this.ready = inside;
        this.waiting.splice(0).forEach((data) => this.postMessage(data));
      });
    }
    load(frame, url) {
      return new Promise((resolve, reject) => {
        const script = frame.contentDocument.createElement("script");
        script.src = new URL(url, location.href).href;
        script.onload = resolve;
        script.onerror = reject;
        frame.contentDocument.body.appendChild(script);
      });
    }
    postMessage(data) {
      if (!this.ready) this.waiting.push(data);
      else this.ready.dispatchEvent(new MessageEvent("message", { data }));
    }
    set onmessage(listener) { this.addEventListener("message", listener); }
    terminate() {}
  };
}
