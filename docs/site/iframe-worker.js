// A page that was opened from disk may not start a worker, and search is one:
// there its script runs in a hidden frame.
if (location.protocol === 'file:') {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const message = data => new MessageEvent('message', {data});
      const frame = document.createElement('iframe');
      frame.hidden = true;
      frame.srcdoc = '';
      const inside = new Promise(done => {
        frame.onload = () => {
          const script = frame.contentDocument.createElement('script');
          script.src = url;
          script.onload = () => done(frame.contentWindow);
          frame.contentWindow.postMessage = data =>
            this.dispatchEvent(message(data));
          frame.contentDocument.body.append(script);
        };
      });
      this.postMessage = data =>
        inside.then(target => target.dispatchEvent(message(data)));
      document.body.append(frame);
    }
  };
}
