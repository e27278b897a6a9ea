// Search in pages that were opened from a folder. Browsers start no worker from a file, so there a worker's script runs
// in a hidden frame of the same page and says and hears what a worker would. Pages that a server sends are left alone.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inner = frame.contentWindow;
      this.inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.inner.importScripts = (...urls) => Promise.all(urls.map((each) => this.load(each)));
      this.loaded = this.load(url);
    }

    load(url) {
      const script = this.inner.document.createElement("script");
      script.src = url;
      const done = new Promise((resolve, reject) => {
        script.onload = resolve;
        script.onerror = reject;
      });
      this.inner.document.body.append(script);
      return done;
    }

    postMessage(data) {
      this.loaded.then(() => this.inner.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      this.inner.frameElement.remove();
    }
  };
}
