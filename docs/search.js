/* The search runs in a Worker, which browsers refuse to pages opened from a disk: there, an iframe takes its place. */
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.window = frame.contentWindow;
      this.window.postMessage = (data) => {
        const event = new MessageEvent("message", { data });
        this.dispatchEvent(event);
        if (this.onmessage) this.onmessage(event);
      };
      const script = this.window.document.createElement("script");
      script.src = url;
      this.ready = new Promise((resolve) => (script.onload = resolve));
      this.window.document.body.append(script);
    }
    postMessage(data) {
      this.ready.then(() => this.window.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {}
  };
}
